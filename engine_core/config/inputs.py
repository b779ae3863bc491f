"""Cheap tests of the files that a run names: there, readable, rows with the columns that are asked for.

The first ``SCAN_BYTES`` of each file are looked at, with the standard library alone; the loader
tests every row again when it reads it. Parquet is only recognised here.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine_core.config.models import ColumnsConfig, DataConfig, EngineConfig
from engine_core.errors import did_you_mean, nearest

SCAN_BYTES = 1_000_000  # about 50 ms a file
SHOWN = 5  # problems told of one file

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

Rows = Iterator[tuple[int, dict[str, Any] | str]]  # line, and the row or what is wrong with it


def files_of(value: str | list[str]) -> list[str]:
    """The files of ``data.train`` or ``data.validation``."""
    return [file for file in ([value] if isinstance(value, str) else value) if file]


def model_problems(config: EngineConfig) -> Iterator[str]:
    """Model and tokenizer folders that are absent or hold no model."""
    model = config.model
    folders = {
        "model.path": model.path,
        "actor.path": config.actor.path,
        "ref.path": config.ref and config.ref.path,
    }
    for key, path in folders.items():
        if path:
            yield from _folder_problem(key, path, ("config.json",), "the folder that save_pretrained wrote")
    tokenizer, key = (model.tokenizer, "model.tokenizer") if model.tokenizer else (model.path, "model.path")
    if tokenizer and (model.tokenizer or Path(tokenizer).is_dir()):
        yield from _folder_problem(
            key, tokenizer, _TOKENIZER_FILES, "a tokenizer there, or model.tokenizer set"
        )


def _folder_problem(key: str, text: str, files: tuple[str, ...], expected: str) -> Iterator[str]:
    path = Path(text)
    if path.is_dir():
        if not any((path / file).is_file() for file in files):
            yield f"{key}: '{text}' has no {' or '.join(files)}. Expected {expected}."
    elif path.exists():
        yield f"{key}: '{text}' is a file. Expected {expected}."
    elif not HUB_NAME.fullmatch(text) or path.parent.is_dir():
        yield f"{key}: there is no folder '{text}'.{_neighbour(path)} Expected {expected}, or a hub name like 'Qwen/Qwen3-0.6B'."


def _neighbour(path: Path) -> str:
    """`` Did you mean 'x'?`` where something of nearly that name lies in the same folder."""
    names = [str(path.parent / other.name) for other in path.parent.iterdir()] if path.parent.is_dir() else []
    match = nearest(str(path), names)
    return f" Did you mean '{match}'?" if match else ""


def data_problems(data: DataConfig) -> Iterator[str]:
    """Files that are absent, empty, of an unknown kind, or whose rows cannot be used."""
    for key, value in (("data.train", data.train), ("data.validation", data.validation)):
        for file in files_of(value):
            yield from _file_problems(key, Path(file), data)


def _file_problems(key: str, path: Path, data: DataConfig) -> Iterator[str]:
    if not path.is_file():
        yield f"{key}: there is no file '{path}'.{_neighbour(path)}"
        return
    if path.stat().st_size == 0:
        yield f"{path}: empty. {key} needs at least one row."
        return
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        yield f"{key}: '{path}' has the ending '{path.suffix}'. Expected one of {', '.join(READERS)}."
        return
    bad = list(_row_problems(path, reader, data))
    if len([line for line, _ in bad if line]) <= data.max_bad_rows:
        bad = [(line, problem) for line, problem in bad if not line]
    yield from (
        f"{path}:{line}: {problem}" if line else f"{path}: {problem}" for line, problem in bad[:SHOWN]
    )
    if len(bad) > SHOWN:
        yield f"{path}: {len(bad) - SHOWN} more rows like these. data.max_bad_rows = N skips up to N of them."


def _row_problems(path: Path, reader: Callable[[Path], Rows], data: DataConfig) -> Iterator[tuple[int, str]]:
    """Line (0: the whole file) and what is wrong."""
    count = 0
    try:
        for line, row in reader(path):
            count += 1
            if isinstance(row, str):
                yield line, row
            elif problem := _column_problem(row, data):
                yield line, problem
    except _Unread:
        return
    except OSError as error:
        yield 0, f"cannot be read: {error.strerror}."
    if not count:
        yield 0, "no rows."


def _column_problem(row: dict[str, Any], data: DataConfig) -> str | None:
    columns = data.columns
    layouts = {
        "messages": (columns.messages,),
        "sharegpt": (columns.messages, "conversations"),
        "auto": (columns.prompt, columns.messages, "conversations"),
    }.get(data.format, (columns.prompt,))
    if not any(name in row for name in layouts):
        wanted = " or ".join(f"'{name}'" for name in dict.fromkeys(layouts))
        return f"no column {wanted}.{did_you_mean(layouts[0], row)} Name it in [data.columns]."
    defaults = ColumnsConfig()
    for key in ColumnsConfig.model_fields:
        name = getattr(columns, key)
        if name != getattr(defaults, key) and name not in row:
            return f"no column '{name}', which data.columns.{key} names.{did_you_mean(name, row)}"
    return None


def _jsonl(path: Path) -> Rows:
    for line, text in _lines(path):
        if not text.strip():
            continue
        if problem := _not_utf8(text):
            yield line, problem
            continue
        try:
            row = json.loads(text.strip())
        except ValueError as error:
            where = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            yield line, f"no JSON: {getattr(error, 'msg', error)}{where}."
            continue
        except RecursionError:
            yield line, "no usable JSON: nested too deeply."
            continue
        yield line, row if isinstance(row, dict) else f"expected an object {{...}}, got {text.strip()[:40]}."


def _csv(path: Path) -> Rows:
    reader = csv.reader(text for _, text in _lines(path))
    header: list[str] = next(reader, [])
    start = reader.line_num + 1
    try:
        for cells in reader:
            wrong = _not_utf8("".join(cells))
            if len(cells) != len(header):
                wrong = f"{len(cells)} cells, but the header has {len(header)}."
            if cells:
                yield start, wrong or dict(zip(header, cells, strict=True))
            start = reader.line_num + 1
    except csv.Error as error:
        yield start, f"no CSV: {error}."


def _parquet(path: Path) -> Rows:
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(0, path.stat().st_size - 4))
        end = file.read(4)
    if (start, end) != (b"PAR1", b"PAR1"):
        yield 0, "no Parquet file (it does not begin and end with PAR1). Was it cut off?"
    else:
        raise _Unread


class _Unread(Exception):
    """The kind of file is right; its rows are left to the loader."""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines from 1 of the part that is looked at; a last line cut by the limit is left out.

    A byte that is not UTF-8 becomes a lone surrogate, which ``_not_utf8`` finds.
    """
    seen = 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(SCAN_BYTES), b""), 1):
            seen += len(line)
            if seen >= SCAN_BYTES:
                return
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")


def _not_utf8(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        return f"not UTF-8 (byte 0x{byte:02x}). Save the file as UTF-8."
    return None


def _json(path: Path) -> Rows:
    with path.open("rb") as file:
        is_array = file.read(64).lstrip().startswith(b"[")
    if is_array:
        raise _Unread
    yield from _jsonl(path)


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
