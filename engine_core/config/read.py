"""The merge of TOML files, environment and overrides to one tree that knows the origin of each key.

Precedence, later wins: defaults < ``extends`` < the file < later files < environment < ``--set``. Tables merge
deeply; arrays are replaced, but arrays whose tables all have a ``name`` merge by name. A path names a table of an array
by that name, ``reward.math.weight``, or by its number, ``data.mix.0.weight``::

    extends = ["base.toml"]              # relative to this file, below the given file's folder
    ENGINE__ACTOR__OPTIM__LR=1e-6        # environment: any case, lowered
    --set actor.optim.lr=1e-6            # values are TOML; what is not TOML is a text

There is no interpolation: the meaning of a file does not depend on its reader.

``tomllib`` does not return the line of a key. The text is therefore cut into its statements, which are parsed one by one.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_core.errors import ConfigError, did_you_mean

KeyPath = tuple[str | int, ...]

_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'
    + r"|'''.*?'{3,5}"
    + r'|"(?:[^"\\\n]|\\.)*"'
    + r"|'[^'\n]*'|#[^\n]*|[\[\]{}\n]",
    re.DOTALL,
)


def key_lines(text: str) -> dict[KeyPath, int]:
    r"""Return the line (from 1) of every key and table header; elements of arrays have their number in the path.

    A key within the value of another key has the line of the outer key. If the text is no TOML, the keys before the
    error are returned.

    Args:
        text: with ``\n`` line ends.
    """
    lines: dict[KeyPath, int] = {}
    latest: dict[KeyPath, int] = {}  # array of tables -> number of its latest element
    table: KeyPath = ()
    for line, statement in _statements(text):
        try:
            parsed = tomllib.loads(statement)
        except (ValueError, RecursionError):
            break  # the rest of a text that is no TOML
        if not statement.startswith("["):
            paths = [(*table, *path) for path in _inner_keys(parsed)]
        else:
            table, inner = (), parsed
            while inner:  # a header has one key on each level
                key, inner = next(iter(inner.items()))
                table = (*table, key)
                if isinstance(inner, list):
                    latest[table] = latest.get(table, -1) + 1
                    lines.setdefault(table, line)
                    inner = inner[0]
                if table in latest:
                    table = (*table, latest[table])
            paths = [table]
        for path in paths:
            lines.setdefault(path, line)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each table header and of each key with its value."""
    depth = start = 0
    line = 1
    for token in _TOKEN.finditer(text + "\n"):
        if token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth -= 1
        elif token[0] == "\n" and depth <= 0:
            yield line, text[start : token.start()].strip()
            line += text.count("\n", start, token.end())
            depth, start = 0, token.end()


def _inner_keys(value: Any) -> Iterator[KeyPath]:
    """Yield the path of every key and element in a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (key,)
        yield from ((key, *path) for path in _inner_keys(inner))


MAX_BYTES = 1_000_000
MAX_DEPTH = 16
MAX_FILES = 64  # reads, repeated ones included: files that extend each other can multiply
ENV_PREFIX = "ENGINE__"

Path_ = tuple[str, ...]
Overrides = Mapping[str, Any] | Sequence[str | Mapping[str, Any]]

_FIXES = {
    "Invalid value": ' A text needs quotes: name = "first". A switch is true or false, in small letters.',
    "Illegal character": " A text ends on its line, with the quote that it began with.",
    "Expected newline": " A value is a text in quotes, a number such as 1e-4, true, false, a list or a table.",
    'Expected "': " A text ends on its line, with the quote that it began with.",
    'Expected "\'"': " A text ends on its line, with the quote that it began with.",
    "Expected ']' at": " A header ends with its bracket: [run], or [[reward]] for one of several.",
    "Cannot overwrite": " The key stands twice in its table: keep one.",
    "Cannot declare": " The table stands twice: write its keys below one header.",
    "Expected '=' after": ' A line is a header, [run], or a key and its value, steps = 100. YAML ("key: value") is not read.',
}
"""How an error of tomllib begins -> what to do."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_KEY_PART = r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[^."'=]+)"""
_KEY = re.compile(rf"{_KEY_PART}(?:\.{_KEY_PART})*")
_OVERRIDE = re.compile(r"""((?:"(?:[^"\\]|\\.)*"|[^"=])+)=(.*)""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a key: a file and line, an environment variable, or an override."""

    file: str | None = None
    line: int | None = None
    env: str | None = None
    override: str | None = None

    def __str__(self) -> str:
        if self.env:
            return f"environment {self.env}"
        if self.override:
            return f"--set {self.override}"
        return f"{self.file}:{self.line}" if self.line else str(self.file)


@dataclass
class RawConfig:
    """The merged tree, not yet validated.

    Example: after ``[[reward]] name = "math"`` on line 3, ``data["reward"][0]["name"] == "math"`` and
    ``str(origins["reward.math.name"]) == "run.toml:3"``.
    """

    data: dict[str, Any]
    origins: dict[str, Origin] = field(default_factory=dict)  # by key as `key_text` writes it
    files: list[Path] = field(default_factory=list)  # those that were named, not those that they extend
    allow_code: bool = False
    unread: list[str] = field(default_factory=list)  # tables that are present and that the run does not read
    inputs: dict[Path_, str] = field(default_factory=dict)  # values of the type `FilePath`, by path
    strays: list[str] = field(default_factory=list)  # environment variables ENGINE_... that are no key's

    @property
    def folder(self) -> Path:
        """The folder of the first file; the working directory without files."""
        return self.files[0].resolve().parent if self.files else Path.cwd()

    def origin(self, path: Sequence[str]) -> Origin | None:
        """Return where ``path``, or else the table around it, was set; None: a default."""
        for count in range(len(path), 0, -1):
            for key in (key_text(path[:count]), ".".join(path[:count])):  # [schedule] is flattened
                if found := self.origins.get(key):
                    return found
        return None


def key_text(path: Sequence[str]) -> str:
    """Return a path as TOML writes it: ``schedule."rollout.temperature"``."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else quoted(part) for part in path)


def quoted(text: str) -> str:
    """Return a TOML string: JSON's escapes, and one more."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_config(
    files: Sequence[str | Path],
    overrides: Overrides = (),
    env: Mapping[str, str] | None = None,
    allow_code: bool = False,
) -> RawConfig:
    """Read and merge ``files``, the environment and overrides.

    Args:
        files: TOML files; a later one wins over an earlier one.
        overrides: ``["actor.optim.lr=1e-6"]`` or ``{"actor.optim.lr": 1e-6}``, or several of both.
        env: default: this process's environment.
        allow_code: files outside the named files' folders may be extended.

    Raises:
        ConfigError: a file that cannot be read, is no TOML, is over a limit, extends in a circle or
            leaves its folder; an override that fits nowhere.
    """
    tree = _Tree([Path(file) for file in files], allow_code)
    for file in tree.files:
        tree.merge_file(file, str(file), ())
    environment = os.environ if env is None else env
    for variable in sorted(environment):
        if variable.upper().startswith(ENV_PREFIX):
            path = tuple(variable[len(ENV_PREFIX) :].lower().split("__"))
            tree.assign(path, _parse_value(environment[variable]), Origin(env=variable))
    strays = [name for name in sorted(environment) if name.upper().startswith(ENV_PREFIX[:-1])]
    for path, value in _override_items(overrides):
        tree.assign(path, value, Origin(override=key_text(path)))
    kept = set(_paths(tree.data))  # a later file may have replaced a table by a value
    origins = {key_text(path): origin for path, origin in tree.origins.items() if path in kept}
    return RawConfig(tree.data, origins, tree.files, allow_code, strays=strays)


class _Tree:
    """Data and origins while they are merged."""

    def __init__(self, files: list[Path], allow_code: bool) -> None:
        self.data: dict[str, Any] = {}
        self.origins: dict[Path_, Origin] = {}
        self.files = files
        self.roots = [file.absolute().parent.resolve() for file in files]
        self.allow_code = allow_code
        self.reads = 0

    def merge_file(self, file: Path, shown: str, chain: tuple[Path, ...]) -> None:
        """Merge a file over the tree, after the files that it extends.

        Raises:
            ConfigError: files extend each other in a circle, or too many are extended.
        """
        resolved = file.resolve()
        if resolved in chain:
            circle = " -> ".join(link.name for link in (*chain[chain.index(resolved) :], resolved))
            raise ConfigError(
                f"{shown}: files extend each other in a circle: {circle}. Remove one `extends`."
            )
        self.reads += 1
        if self.reads > MAX_FILES:
            raise ConfigError(
                f"{shown}: more than {MAX_FILES} files are extended. Merge some of them into one."
            )
        data, lines = _read_toml(file, shown)
        where = f"{shown}:{lines.get(('extends',), 1)}"
        for base in _as_extends(data.pop("extends", []), where):
            path = file.parent / base
            self.check_inside(path, base, where)
            self.merge_file(path, os.path.normpath(path), (*chain, resolved))
        _merge_tables(self.data, data)
        for key, line in lines.items():
            if key[0] != "extends":
                self.origins[_named(data, key)] = Origin(file=shown, line=line)

    def check_inside(self, path: Path, base: str, where: str) -> None:
        """Refuse an extended file outside the allowed folders.

        Raises:
            ConfigError: the file is outside.
        """
        if self.allow_code or any(path.resolve().is_relative_to(root) for root in self.roots):
            return
        folders = ", ".join(sorted({str(root) for root in self.roots}))
        raise ConfigError(
            f"{where}: extends '{base}', which is outside {folders}. Only files in or below that folder may be "
            "extended; move the file there, name it on the command line before this one, or pass --allow-code."
        )

    def assign(self, path: Path_, value: Any, origin: Origin) -> None:
        """Set one key; a table merges, everything else replaces.

        Raises:
            ConfigError: the path has an empty part, or names a table.
        """
        if not all(path):
            raise ConfigError(f"{origin}: the key has an empty part. Expected one like actor.optim.lr.")
        node: Any = self.data
        for count, part in enumerate(path[:-1], 1):
            node = _enter(node, part, path[:count], origin)
        if isinstance(value, dict) and (isinstance(node, list) or isinstance(node.get(path[-1]), dict)):
            _merge_tables(_enter(node, path[-1], path, origin), value)
        elif isinstance(node, list):
            raise ConfigError(f"{origin}: {key_text(path)} is a table. Name one of its keys.")
        else:
            node[path[-1]] = copy.deepcopy(value)
        for inner in _paths(value):
            self.origins[(*path, *inner)] = origin


def _enter(node: Any, part: str, path: Path_, origin: Origin) -> Any:
    """Return the table ``part`` of a table, created if missing; or the element of that name of an array."""
    inner = _elements(node).get(part) if isinstance(node, list) else node.setdefault(part, {})
    if inner is None:
        names = did_you_mean(part, _elements(node))
        raise ConfigError(f"{origin}: {key_text(path[:-1])} has no entry named '{part}'.{names}")
    if not isinstance(inner, dict) and not _elements(inner):
        raise ConfigError(f"{origin}: {key_text(path)} holds a value, not a table.")
    return inner


def _as_extends(value: Any, where: str) -> list[str]:
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ConfigError(
            f'{where}: extends: got {value!r}, expected a list of files: extends = ["base.toml"].'
        )
    return files


def _read_toml(file: Path, shown: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    text = _read_text(file, shown)
    try:
        data, lines = tomllib.loads(text), key_lines(text)
    except (ValueError, RecursionError) as error:
        match = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", str(error))
        place = match[1] if match and match[1] else text.count("\n") + 1
        column = f":{match[2]}" if match and match[2] else ""
        what = str(error)[: match.start()] if match else str(error)
        fix = next((fix for start, fix in _FIXES.items() if what.startswith(start)), "")
        raise ConfigError(f"{shown}:{place}{column}: this is no TOML: {what}.{fix}") from None
    for path, line in lines.items():
        if len(path) > MAX_DEPTH:
            raise ConfigError(
                f"{shown}:{line}: nested deeper than {MAX_DEPTH} levels. Nothing in a run needs that."
            )
    return data, lines


def _read_text(file: Path, shown: str) -> str:
    if not file.is_file():
        if re.fullmatch(r"[\w.]+=.*", shown):  # other frameworks take keys like this
            raise ConfigError(f"{shown}: there is no such file. To set a key, write --set {shown}.")
        if file.is_dir():
            inside = ", ".join(sorted(f"'{shown}/{p.name}'" for p in file.glob("*.toml")))
            raise ConfigError(
                f"{shown}: is a folder. Name a run file" + (f" in it: {inside}." if inside else ".")
            )
        names = [p.name for p in file.parent.glob("*.toml")] if file.parent.is_dir() else []
        raise ConfigError(f"{shown}: there is no such file.{did_you_mean(file.name, names) if names else ''}")
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}.") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"{shown}: larger than {MAX_BYTES // 1_000_000} MB. Is it a run file? Data belongs under [data]."
        )
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{shown}:{line}: not UTF-8 (byte 0x{content[error.start]:02x}). Save it as UTF-8."
        ) from None


def _override_items(overrides: Overrides) -> Iterator[tuple[Path_, Any]]:
    for entry in [overrides] if isinstance(overrides, Mapping) else overrides:
        if isinstance(entry, Mapping):
            yield from ((split_key(key), value) for key, value in entry.items())
        elif match := _OVERRIDE.fullmatch(entry):
            yield split_key(match[1].strip()), _parse_value(match[2])
        else:
            raise ConfigError(f"--set {entry}: expected KEY=VALUE, like --set actor.optim.lr=1e-6.")


def split_key(key: str) -> Path_:
    """``schedule."rollout.temperature"`` -> ``("schedule", "rollout.temperature")``.

    Raises:
        ConfigError: an empty part or an open quote.
    """
    if not _KEY.fullmatch(key):
        raise ConfigError(f"--set {key}: this is no key. Expected one like actor.optim.lr.")
    parts = (match[1] for match in re.finditer(_KEY_PART, key))
    return tuple(_parse_value(part) if part[0] in "\"'" else part.strip() for part in parts)


def _parse_value(text: str) -> Any:
    """TOML where it is TOML, else the text itself; dates stay texts."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    dates = (datetime.date, datetime.time)
    return text if len(parsed) != 1 or isinstance(parsed["value"], dates) else parsed["value"]


def _is_named(value: Any) -> bool:
    """Return whether a value is an array of tables that all have a name."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(element, dict) and isinstance(element.get("name"), str) for element in value)
    )


def _elements(array: Any) -> dict[str, Any]:
    """Return the tables of an array by their names, or by their numbers if one has no name; empty for other values."""
    if _is_named(array):
        return {element["name"]: element for element in array}
    tables = isinstance(array, list) and all(isinstance(element, dict) for element in array)
    return {str(number): element for number, element in enumerate(array)} if tables else {}


def _merge_tables(into: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _merge_tables(old, value)
        elif _is_named(old) and _is_named(value):
            known = _elements(old)
            for element in value:
                if (merged := known.pop(element["name"], None)) is not None:
                    _merge_tables(merged, element)
                else:  # also a second one of that name in one file, which is refused later
                    into[key].append(copy.deepcopy(element))
        else:
            into[key] = copy.deepcopy(value)


def _named(data: Any, path: KeyPath) -> Path_:
    """Return a path of the scanner with the numbers of named elements replaced by their names."""
    named: list[str] = []
    node = data
    for part in path:
        node = node[part]
        name = node.get("name") if isinstance(part, int) and isinstance(node, dict) else None
        named.append(name if isinstance(name, str) else str(part))
    return tuple(named)


def _paths(value: Any) -> Iterator[Path_]:
    """Yield the path of ``value`` and of every key below it."""
    yield ()
    for key, inner in (value if isinstance(value, dict) else _elements(value)).items():
        for path in _paths(inner):
            yield (key, *path)
