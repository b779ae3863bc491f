"""Sessions: a job that runs one piece of code after another, in the same state.

Pieces come through the pipe that is the job's stdin, each ended by a zero byte. After each one a zero byte is written
to the pipe for values: all of its output lies in the pipe for output then.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
import traceback
import types
from collections.abc import Iterator

import view
from python_tests import VALUES, Source, fresh_streams

SHOW = "__show__"
COMMANDS = 4  # descriptor of the pieces of code
BASH = f"""
exec {COMMANDS}<&0 </dev/null
while IFS= read -r -d '' -u {COMMANDS} command; do
    eval "$command" {COMMANDS}<&- {VALUES}>&-
    printf '\\0' >&{VALUES}
done
"""


class Piece(Source):
    """A loader of one piece of Python; the value of an expression at its end is shown, as Python's prompt does."""

    def get_code(self, name: str) -> types.CodeType:
        """Return the compiled text."""
        tree = ast.parse(self.text, self.path)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            last.value = ast.Call(ast.Name(SHOW, ast.Load()), [last.value], [])
            ast.fix_missing_locations(tree)
        return self.source_to_code(tree, self.path)


def python(what: dict) -> None:
    """Run pieces of Python in one module until the pipe ends. An error is printed and ends its piece."""
    os.dup2(0, COMMANDS)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    fresh_streams()
    sys.argv = [""]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    setattr(main, SHOW, sys.displayhook)
    for number, source in enumerate(_pieces(), 1):
        path = f"<call {number}>"
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        try:
            Piece(source, path).exec_module(main)
        except BaseException as error:
            trace = error.__traceback__
            while trace and not trace.tb_frame.f_code.co_filename.startswith("<call "):
                trace = trace.tb_next  # skip the frames of this file
            traceback.print_exception(type(error), error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(VALUES, b"\0")


def _pieces() -> Iterator[str]:
    left = b""
    while data := os.read(COMMANDS, 1 << 16):
        *pieces, left = (left + data).split(b"\0")
        for piece in pieces:
            yield piece.decode("utf-8", "replace")


def bash(what: dict) -> None:
    """Become a shell that runs pieces of shell code until the pipe ends; never returns."""
    variables = {"PATH": what["path"], "HOME": view.WORK, "TMPDIR": view.WORK, "LANG": "C.UTF-8"}
    os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "-c", BASH, "bash"], variables)


KINDS = {"python": python, "bash": bash}
