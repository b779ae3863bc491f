"""``engine COMMAND``: what each command is called, where it lives, and how it ends.

A command's module is imported when the command is used, so that the quick ones stay quick. Results
go to stdout, progress and messages to stderr. Exit codes: 0 ok, 1 a bug of ours (with its
traceback), 2 usage or configuration, 3 plugin, 4 data, 5 environment, 6 training failed, 130
interrupted, 143 terminated, 75 a training that was told to stop and has saved.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from engine_core import __version__
from engine_core.errors import ConfigError, EngineError, EnvironmentProblem, did_you_mean
from engine_core.preemption import Terminated
from engine_core.redaction import show_uncaught, without_secrets
from engine_core.runtime.elastic import controlling, serve

COMMANDS: Mapping[str, str | Mapping[str, str]] = {
    "train": "engine_core.cli.train:train",
    "resume": "engine_core.cli.train:resume",
    "validate": "engine_core.cli.configs:validate",
    "config": {"show": "engine_core.cli.configs:show"},
    "schema": "engine_core.cli.configs:schema",
    "plugins": "engine_core.cli.plugins:plugins",
    "doctor": "engine_core.cli.doctor:doctor",
    "generate": "engine_core.cli.models:generate",
    "eval": "engine_core.cli.models:evaluate",
    "compare": "engine_core.cli.compare:compare",
    "export": "engine_core.cli.models:export",
    "serve-reward": "engine_core.cli.serving:serve_reward",
    "report": "engine_core.cli.runs:report",
    "inspect": {"rollouts": "engine_core.cli.runs:rollouts"},
    "replay": "engine_core.cli.replay:replay",
    "prune": "engine_core.cli.runs:prune",
    "scale": "engine_core.cli.scale:scale",
    "bench": {
        "train": "engine_core.cli.bench:train",
        "rollout": "engine_core.cli.bench:rollout",
        "sync": "engine_core.cli.bench:sync",
        "step": "engine_core.cli.bench:step",
        "comm": "engine_core.cli.bench:comm",
        "simulate": "engine_core.cli.bench:simulate",
    },
    "new": {"plugin": "engine_core.cli.new:plugin", "run": "engine_core.cli.new:run"},
}
"""Every command, in the order of the help; a table is a command with commands of its own."""

GROUP_HELP = {
    "bench": "Measure the parts of a run on this machine.",
    "config": "Look at a configuration.",
    "inspect": "Look into a run.",
    "new": "Start a plugin or a run file from a template.",
}
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no bug of ours, whoever met it
PLAIN: Mapping[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


class CommandGroup(TyperGroup):
    """Commands by name, each built from its function when it is asked for."""

    def __init__(self, *, table: Mapping[str, str | Mapping[str, str]] = COMMANDS, **settings: Any) -> None:
        super().__init__(**settings)
        self.table = table

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = self.table.get(cmd_name)
        if entry is None:
            raise ConfigError(f"Unknown command '{cmd_name}'.{did_you_mean(cmd_name, self.table)}")
        if not isinstance(entry, str):
            return CommandGroup(name=cmd_name, table=entry, help=GROUP_HELP[cmd_name], rich_markup_mode=None)
        module, _, function = entry.partition(":")
        single = typer.Typer(**PLAIN)
        single.command(cmd_name)(getattr(importlib.import_module(module), function))
        return get_command(single)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])


app = typer.Typer(cls=CommandGroup, **PLAIN)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"engine {__version__}")
        raise typer.Exit


@app.callback()
def engine(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Post-training of language models, every heavy part of which is a plugin."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after ``engine``; default: those of the process.

    Returns:
        The exit code. An exception that is no ``EngineError`` is a bug of ours and passes through.
    """
    try:
        with _sigterm_ends_cleanly(), controlling() as controls:
            if not controls:  # a rank of torchrun that is not the first: it serves the first one's command
                return serve()
            code = get_command(app).main(args=argv, prog_name="engine", standalone_mode=False)
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except EngineError as error:
        for problem in str(error).splitlines():
            _complain(problem)
        return error.exit_code
    except typer.TyperException as error:  # a wrong option or argument
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "engine"
        _complain(f"{error.format_message().rstrip('.')}. See '{command} --help'.")
        return 2
    except Terminated:
        return Terminated.code
    except BrokenPipeError:  # the reader of our output has gone, as in `engine plugins | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # as Typer does where it meets this first
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK:
            _complain(f"{error}. What was written before is untouched.")
            return EnvironmentProblem.exit_code
        sys.excepthook = show_uncaught
        raise


def _complain(message: str) -> None:
    print(without_secrets(f"engine: {message}"), file=sys.stderr)


@contextmanager
def _sigterm_ends_cleanly() -> Iterator[None]:
    """SIGTERM raises ``Terminated``, so that workers are stopped and files are closed on the way out."""
    if threading.current_thread() is not threading.main_thread():  # only it may handle signals
        yield
        return
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: object) -> None:
    raise Terminated


if __name__ == "__main__":
    sys.exit(main())
