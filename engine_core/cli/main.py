"""``engine COMMAND``: what each command is called, where it lives, and how it ends.

A command's module is imported when the command is used, so that the quick ones stay quick. Results
go to stdout, progress and messages to stderr. Exit codes: 0 ok, 1 a bug of ours (with its
traceback), 2 usage or configuration, 3 plugin, 4 data, 5 environment, 6 training failed, 130
interrupted, 143 terminated, 75 a training that was told to stop and has saved.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from engine_core import __version__
from engine_core.errors import (
    ConfigError,
    EngineError,
    EnvironmentProblem,
    did_you_mean,
    nearest,
)
from engine_core.launch import controlling, serve
from engine_core.plugins import PluginSet
from engine_core.plugins.metadata import find, known_names, our_plugins, split
from engine_core.redaction import show_uncaught, without_secrets
from engine_core.specs import Command
from engine_core.train.stopping import Terminated

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no bug of ours, whoever met it
FIRST = (
    "train",
    "resume",
    "validate",
    "config",
    "schema",
    "plugins",
    "doctor",
    "generate",
    "eval",
    "compare",
    "export",
)
"""Commands that the help shows first, in this order; others follow by name."""
PLAIN: Mapping[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


class CommandGroup(TyperGroup):
    """Commands by name, from the metadata of what is installed; a command's plugin is imported when the command is used.

    Args:
        prefix: of the group's commands: ``bench.``; empty: all of them.
    """

    def __init__(self, *, prefix: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.prefix = prefix

    def list_commands(self, ctx: Any) -> list[str]:
        offered = (name for name in known_names("commands") if name.startswith(self.prefix))
        found = dict.fromkeys(name.removeprefix(self.prefix).partition(".")[0] for name in offered)
        rank = {name: number for number, name in enumerate(FIRST)}
        return sorted(found, key=lambda name: (rank.get(name, len(rank)), name))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        distribution, short = split(cmd_name)
        full = self.prefix + short
        if any(find("commands", full)):
            return _loaded(cmd_name, f"{distribution}:{full}" if distribution else full)
        inner = sorted(name for name in known_names("commands") if name.startswith(f"{full}."))
        if not inner:
            raise ConfigError(self._unknown(short, self.list_commands(ctx)))
        return CommandGroup(name=short, prefix=f"{full}.", help=_group_help(inner), rich_markup_mode=None)

    def _unknown(self, name: str, known: Sequence[str]) -> str:
        """Return why there is no such command, and what to type or to install instead."""
        to_install = {
            command.removeprefix(self.prefix).partition(".")[0]: distribution
            for (kind, command), distribution in our_plugins().items()
            if kind == "commands" and command.startswith(self.prefix)
        }
        match = nearest(name, [*known, *(to_install.keys() - set(known))])
        if match in known or match is None:
            return f"Unknown command '{name}'.{did_you_mean(name, known)}"
        way = f"pip install {to_install[match]}"
        if match == name:
            return f"Command '{name}' is not installed. Try: {way}"
        listed = ", ".join(sorted(known))
        return (
            f"Unknown command '{name}'. Did you mean '{match}'? Known: {listed}. It is not installed: {way}"
        )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])


def _loaded(name: str, full: str) -> Any:
    """Return a command, its plugin imported; where that fails, a command that says so, for the help of all others to be readable.

    Args:
        name: what the user types.
        full: with the group, and the distribution where the user wrote one.
    """
    single = typer.Typer(**PLAIN)
    settings = {}
    try:
        function = PluginSet.load({"commands": [full]}).resolve("commands", full)
    except EngineError as error:
        problem = error  # Python forgets `error` where this block ends

        def function() -> None:
            raise problem

        function.__doc__ = f"Cannot be used: {problem}"
        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    single.command(name, context_settings=settings)(function)
    return get_command(single)


def _group_help(commands: Sequence[str]) -> str:
    """Return the line about a group that the first of its commands to have one gives."""
    for name in commands:
        with suppress(EngineError):
            spec = PluginSet.load({"commands": [name]}).spec("commands", name)
            assert isinstance(spec, Command)
            if spec.group_help:
                return spec.group_help
    return ""


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
