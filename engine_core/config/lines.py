"""On which line each key of a TOML stands, which ``tomllib`` does not tell.

A scanner, not a parser: it runs before ``tomllib`` and enforces the limits on hostile files; where
the text is no TOML it stops, and ``tomllib`` words the error.
"""

from __future__ import annotations

import bisect
import contextlib
import re
import tomllib

from engine_core.errors import ConfigError

MAX_DEPTH = 16
MAX_KEYS = 10_000

KeyPath = tuple[str | int, ...]

_SPACE = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_BLANK = re.compile(r"[ \t]*")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}' + r"|'''.*?'{3,5}" + r'|"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'", re.DOTALL
)
_KEY = re.compile(r'[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'")
_SCALAR = re.compile(r"[^,\]}\n#]+")


class _NotTOML(Exception):
    """The text is malformed here; ``tomllib`` says how."""


def key_lines(text: str, file: str) -> dict[KeyPath, int]:
    """The line (from 1) of every key and table header; elements of arrays have their number in the path.

    Args:
        text: with ``\\n`` line ends.
        file: for messages.

    Raises:
        ConfigError: nested deeper than ``MAX_DEPTH`` or more than ``MAX_KEYS`` keys.
    """
    scanner = _Scanner(text, file)
    with contextlib.suppress(_NotTOML):  # tomllib reads the same text next and words the error
        scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str, file: str) -> None:
        self.text, self.file, self.at = text, file, 0
        self.lines: dict[KeyPath, int] = {}
        self.last: dict[KeyPath, int] = {}  # array of tables -> number of its latest element
        self.line_ends = [match.start() for match in re.finditer("\n", text)]

    def document(self) -> None:
        table: KeyPath = ()
        while self.peek(_SPACE):
            if self.take("[["):
                *parents, name = self.key()
                array = (*self.resolve(parents), name)
                self.last[array] = self.last.get(array, -1) + 1
                table = (*array, self.last[array])
                self.record(array)
                self.expect("]]")
            elif self.take("["):
                table = self.resolve(self.key())
                self.expect("]")
            else:
                self.pair(table)
                continue
            self.record(table)

    def resolve(self, parts: list[str]) -> KeyPath:
        """The path of a header, in which the name of an array of tables means its latest element."""
        path: KeyPath = ()
        for part in parts:
            path = (*path, part)
            if path in self.last:
                path = (*path, self.last[path])
        return path

    def pair(self, table: KeyPath) -> None:
        parts = self.key()
        for count in range(1, len(parts) + 1):
            self.record((*table, *parts[:count]))
        self.expect("=")
        self.value((*table, *parts))

    def value(self, path: KeyPath) -> None:
        opening = self.peek(_BLANK)
        if len(path) > MAX_DEPTH:
            self.refuse(f"nested deeper than {MAX_DEPTH} levels. Nothing in a run needs that")
        if self.take("["):
            number = 0
            while self.peek(_SPACE) != "]":
                self.value((*path, number))
                number += 1
                if self.peek(_SPACE) != "]":
                    self.expect(",")
            self.take("]")
        elif self.take("{"):
            while self.peek(_SPACE) != "}":
                self.pair(path)
                if self.peek(_SPACE) != "}":
                    self.expect(",")
            self.take("}")
        else:
            self.match(_STRING if opening and opening in "\"'" else _SCALAR)

    def key(self) -> list[str]:
        parts: list[str] = []
        while not parts or self.take("."):
            self.match(_BLANK)
            part = self.match(_KEY)
            try:
                parts.append(str(tomllib.loads(f"k={part}")["k"]) if part[0] in "\"'" else part)
            except ValueError:
                raise _NotTOML from None
            self.match(_BLANK)
            if len(parts) > MAX_DEPTH:
                self.refuse(f"a key of more than {MAX_DEPTH} parts. Nothing in a run needs that")
        return parts

    def record(self, path: KeyPath) -> None:
        self.lines.setdefault(path, self.line)
        if len(path) > MAX_DEPTH:
            self.refuse(f"nested deeper than {MAX_DEPTH} levels. Nothing in a run needs that")
        if len(self.lines) > MAX_KEYS:
            self.refuse(f"more than {MAX_KEYS} keys. Keep data in data files, named under [data]")

    @property
    def line(self) -> int:
        return bisect.bisect_left(self.line_ends, self.at) + 1

    def peek(self, skipped: re.Pattern[str]) -> str:
        """The next character after ``skipped``; empty at the end."""
        self.match(skipped)
        return self.text[self.at : self.at + 1]

    def take(self, token: str) -> bool:
        found = self.text.startswith(token, self.at)
        self.at += len(token) if found else 0
        return found

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise _NotTOML

    def match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise _NotTOML
        self.at = found.end()
        return found.group()

    def refuse(self, what: str) -> None:
        raise ConfigError(f"{self.file}:{self.line}: {what}.")
