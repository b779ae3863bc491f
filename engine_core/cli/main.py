"""The ``engine`` command line: command lookup, exit codes and error output.

A command's module is imported when the command is used, so that short commands start fast. Results
go to stdout, progress and messages to stderr. Exit codes: 0 success, 1 a bug in the engine (with its
traceback), 2 usage or configuration, 3 plugin, 4 data, 5 environment, 6 training failed, 130
interrupted, 143 terminated, 75 training stopped on request after saving a checkpoint.
"""

from __future__ import annotations

import errno
import faulthandler
import inspect
import os
import re
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
from engine_core.errors import ConfigError, EngineError, EnvironmentProblem
from engine_core.launch import controlling, serve
from engine_core.plugins import PluginSet
from engine_core.plugins.metadata import find, known_names, split, unknown_name
from engine_core.redaction import harmless, show_uncaught, without_secrets
from engine_core.train.stopping import Terminated

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # a full or read-only disk: reported without a traceback
FIRST = ("train", "resume", "validate", "config", "schema", "plugins", "doctor", "generate", "eval", "export")
"""Commands that the help lists first, in this order. The others follow in alphabetical order."""
EXIT_CODES = "Exit codes: 0 done, 1 bug, 2 usage, 3 plugin, 4 data, 5 environment, 6 training failed, 75 stopped and saved."
"""The last paragraph of each command's help."""
COMPLETED = re.compile(r"\b(RUN|FILE|KEY=VALUE)\b")
"""Metavars of what a shell completes."""
PLAIN: Mapping[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


class CommandGroup(TyperGroup):
    """A group of commands, listed from the metadata of the installed distributions.

    The plugin of a command is imported when the command is used.

    Args:
        prefix: start of the names of the group's commands, such as ``bench.``; empty: all commands.
    """

    def __init__(self, *, prefix: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.prefix = prefix

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands of the group, those of ``FIRST`` before the others."""
        offered = (name for name in known_names("commands") if name.startswith(self.prefix))
        found = dict.fromkeys(name.removeprefix(self.prefix).partition(".")[0] for name in offered)
        rank = {name: number for number, name in enumerate(FIRST)}
        return sorted(found, key=lambda name: (rank.get(name, len(rank)), name))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command or an inner group by name, None for an unknown one that a shell completes.

        Raises:
            ConfigError: the name is unknown.
        """
        distribution, short = split(cmd_name)
        full = self.prefix + short
        if any(find("commands", full)):
            return _loaded(cmd_name, f"{distribution}:{full}" if distribution else full)
        group = CommandGroup(name=short, prefix=f"{full}.", rich_markup_mode=None)
        if not (inner := group.list_commands(ctx)):
            if ctx.resilient_parsing:
                return None
            raise ConfigError(unknown_name("commands", full))
        group.help = f"Commands: {', '.join(inner)}."
        return group

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show the help if there are no arguments."""
        return super().parse_args(ctx, args or ["--help"])


def _loaded(name: str, full: str) -> Any:
    """Import the plugin of a command and return the command.

    If the import fails, return a command that raises the error, so that the help still lists the other commands.

    Args:
        name: the name as the user typed it.
        full: the name with its group, and with the distribution if the user wrote one.
    """
    single = typer.Typer(add_completion=False, **PLAIN)
    settings = {}
    try:
        function = PluginSet.load({"commands": [full]}).resolve("commands", full)
    except EngineError as error:
        problem = error  # Python deletes `error` at the end of this block

        def function() -> None:
            """Raise the error of the import."""
            raise problem

        function.__doc__ = f"Cannot be used: {problem}"
        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    text = inspect.getdoc(function) or ""
    # the other sections are for readers of the code
    help_text = re.split(r"\n\n(?:Args|Returns|Raises):\n", text)[0]
    single.command(name, help=help_text, epilog=EXIT_CODES, context_settings=settings)(function)
    command = get_command(single)
    for parameter in command.params:
        if COMPLETED.search(parameter.metavar or ""):
            parameter._custom_shell_complete = _complete
    return command


def _complete(ctx: Any, parameter: Any, incomplete: str) -> list[str]:
    """Return what a shell offers for an incomplete word, from the part ``completion``."""
    words = ctx.parent.args  # those of `ctx` end before a last `--set`
    try:
        return list(PluginSet().require("parts", "completion")(parameter.metavar, words, incomplete))
    except (EngineError, OSError):  # the line that is typed has no place for a message
        return []


SHAPE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Native caches of torch on a CPU, with an entry for each shape: by default they grow by 60 KB a step for thousands of steps."""

app = typer.Typer(cls=CommandGroup, context_settings={"help_option_names": ["--help", "-h"]}, **PLAIN)


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
    """Post-training of language models; every heavy part is a plugin."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after ``engine``; default: those of this process.

    Returns:
        The exit code.

    Raises:
        Exception: any error that is not an ``EngineError``, a usage error or a full disk: a bug in the engine.
    """
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        # a crash in native code shows the line of the plugin that called it
        faulthandler.enable(sys.__stderr__)
    for cache in SHAPE_CACHES:  # before torch is imported; workers inherit it
        os.environ.setdefault(cache, "64")
    try:
        with _sigterm_ends_cleanly(), controlling() as controls:
            if not controls:  # a torchrun rank other than 0 executes the commands of rank 0
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
        option = getattr(error, "option_name", "").lstrip("-")
        key = f" A key is set by --set {option}=VALUE." if "." in option else ""
        _complain(f"{error.format_message().rstrip('.')}.{key} See '{command} --help'.")
        return 2
    except Terminated:
        return Terminated.code
    except BrokenPipeError:  # the reader of stdout has exited, as in `engine plugins | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # the exit code that Typer uses for a broken pipe
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK:
            _complain(f"{error}. What was written before is untouched.")
            return EnvironmentProblem.exit_code
        sys.excepthook = show_uncaught
        raise


def _complain(message: str) -> None:
    print(harmless(without_secrets(f"engine: {message}")), file=sys.stderr)


@contextmanager
def _sigterm_ends_cleanly() -> Iterator[None]:
    """Make SIGTERM raise ``Terminated``, so that workers are stopped and files are closed."""
    if threading.current_thread() is not threading.main_thread():  # only it may set signal handlers
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
