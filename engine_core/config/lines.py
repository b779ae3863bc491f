"""On which line each key of a TOML stands, which ``tomllib`` does not tell.

A scanner, not a parser: it runs before ``tomllib`` and enforces the limits on hostile files; where
the text is no TOML it stops, and ``tomllib`` words the error.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Sequence

from engine_core.errors import ConfigError

MAX_DEPTH = 16
MAX_KEYS = 10_000

KeyPath = tuple[str | int, ...]

_STRING = r'"""(?:[^\\]|\\.)*?"{3,5}' + r"|'''.*?'{3,5}" + r'|"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'"
_SIGNS = "[]{}=,.\n"
_BARE = r"""[^\s#"'\[\]{}=,.]+"""
_TOKEN = re.compile(rf"(?:[ \t]|#[^\n]*+)*+({_STRING}|[{re.escape(_SIGNS)}]|{_BARE})", re.DOTALL)


def key_lines(text: str, file: str) -> dict[KeyPath, int]:
    """The line (from 1) of every key and table header; elements of arrays have their number in the path.

    Args:
        text: with ``\\n`` line ends.
        file: for messages.

    Raises:
        ConfigError: nested deeper than ``MAX_DEPTH`` or more than ``MAX_KEYS`` keys.
    """
    scanner = _Scanner(text, file)
    with contextlib.suppress(ValueError):  # no TOML: tomllib reads the same text next and says why
        scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.at, self.line, self.token = 0, 1, ""  # the current token, its line, and where it ends
        self.lines: dict[KeyPath, int] = {}
        self.last: dict[KeyPath, int] = {}  # array of tables -> number of its latest element

    def document(self) -> None:
        table: KeyPath = ()
        self.take()
        while self.after_newlines():
            if self.token == "[":
                table = self.header()
            else:
                self.pair(table)

    def header(self) -> KeyPath:
        """``[a.b]`` or ``[[a.b]]``: the path, in which the name of an array means its latest element."""
        self.take("[")
        is_array = self.token == "["
        if is_array:
            self.take("[")
        *parents, name = self.key()
        path: KeyPath = ()
        for part in parents:
            path = self.element((*path, part))
        path = (*path, name)
        if is_array:
            self.last[path] = self.last.get(path, -1) + 1
            self.record(path)
            self.take("]")
        self.record(path := self.element(path))
        self.take("]")
        return path

    def element(self, path: KeyPath) -> KeyPath:
        return (*path, self.last[path]) if path in self.last else path

    def pair(self, table: KeyPath) -> None:
        parts = self.key()
        for count in range(1, len(parts) + 1):
            self.record((*table, *parts[:count]))
        self.take("=")
        self.value((*table, *parts))

    def value(self, path: KeyPath) -> None:
        self.check_depth(path)
        closing = {"[": "]", "{": "}"}.get(self.token)
        if closing is None:
            while self.token and self.token not in ",]}\n":
                self.take()
            return
        self.take()
        number = 0
        while self.after_newlines() != closing:
            if closing == "}":
                self.pair(path)
            else:
                self.value((*path, number))
            number += 1
            if self.after_newlines() != closing:
                self.take(",")
        self.take(closing)

    def key(self) -> list[str]:
        parts: list[str] = []
        while not parts or self.token == ".":
            if parts:
                self.take(".")
            part = self.take()
            if part in _SIGNS:  # or the end
                raise ValueError
            parts.append(tomllib.loads(f"k={part}")["k"] if part[0] in "\"'" else part)
            self.check_depth(parts)
        return parts

    def record(self, path: KeyPath) -> None:
        self.lines.setdefault(path, self.line)
        self.check_depth(path)
        if len(self.lines) > MAX_KEYS:
            self.refuse(f"more than {MAX_KEYS} keys. Keep data in data files, named under [data]")

    def after_newlines(self) -> str:
        while self.token == "\n":
            self.take()
        return self.token

    def take(self, expected: str | None = None) -> str:
        """Go to the next token; it is empty at the end, and where nothing of TOML follows."""
        token = self.token
        if expected not in (None, token):
            raise ValueError
        self.line += token.count("\n")
        found = _TOKEN.match(self.text, self.at)
        self.token = found[1] if found else ""
        self.at = found.end() if found else self.at
        return token

    def check_depth(self, path: Sequence[str | int]) -> None:
        if len(path) > MAX_DEPTH:
            self.refuse(f"nested deeper than {MAX_DEPTH} levels. Nothing in a run needs that")

    def refuse(self, what: str) -> None:
        raise ConfigError(f"{self.file}:{self.line}: {what}.")
