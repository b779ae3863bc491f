"""Cheap tests of the files that a run names: there, readable, rows with the columns that are asked for.

The first ``SCAN_BYTES`` of each file are looked at, with the standard library alone; the loader
tests every row again when it reads it. Parquet is only recognised here.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.choices import OPTIONAL_ROLES
from engine_core.config.models import ColumnsConfig, DataConfig, EngineConfig
from engine_core.errors import did_you_mean, nearest

if TYPE_CHECKING:
    from engine_core.config.evaluation import EvalSetConfig

SCAN_BYTES = 1_000_000  # about 50 ms a file
SHOWN = 5  # problems reported for one file

KINDS = (".jsonl", ".json", ".csv", ".parquet")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

Rows = Iterator[tuple[int, dict[str, Any] | str]]  # line, and the row or what is wrong with it


def files_of(value: str | list[str]) -> list[str]:
    """Return the files of ``data.train`` or ``data.validation``."""
    return [file for file in ([value] if isinstance(value, str) else value) if file]


def model_problems(config: EngineConfig) -> Iterator[str]:
    """Model and tokenizer folders that are absent or hold no model."""
    model = config.model
    folders = {
        "model.path": model.path,
        "actor.path": config.actor.path,
        "ref.path": config.ref and config.ref.path,
        "critic.path": config.critic and config.critic.path,
        "teacher.path": config.teacher and config.teacher.path,
    }
    for key, path in folders.items():
        if path:
            yield from _folder_problem(key, path, ("config.json",), "the folder that save_pretrained wrote")
    for role in ("actor", *OPTIONAL_ROLES):
        holder = getattr(config, role)
        if holder and holder.lora and (adapter := holder.lora.path):
            wanted = "an adapter folder of peft or of `engine export --adapter`"
            yield from _folder_problem(
                f"{role}.lora.path", adapter, ("adapter_config.json",), wanted, hub=False
            )
    yield from _tokenizer_problem("model", model.path, model.tokenizer)
    if config.teacher and config.teacher.path and Path(config.teacher.path).is_dir():
        wanted = "the teacher's tokenizer there, to compare it with the student's"
        yield from _folder_problem("teacher.path", config.teacher.path, _TOKENIZER_FILES, wanted)
    for reward in config.reward:
        for kind, table in reward.models.items():
            at = f"reward.{reward.name}.{kind}"
            yield from _folder_problem(
                f"{at}.path", table.path, ("config.json",), "the folder that save_pretrained wrote"
            )
            yield from _tokenizer_problem(at, table.path, table.tokenizer)


def _tokenizer_problem(table: str, path: str, own: str | None) -> Iterator[str]:
    key, folder = (f"{table}.tokenizer", own) if own else (f"{table}.path", path)
    if folder and (own or Path(folder).is_dir()):
        wanted = f"a tokenizer there, or {table}.tokenizer set"
        yield from _folder_problem(key, folder, _TOKENIZER_FILES, wanted)


def _folder_problem(
    key: str, text: str, files: tuple[str, ...], expected: str, hub: bool = True
) -> Iterator[str]:
    path = Path(text)
    if path.is_dir():
        if not any((path / file).is_file() for file in files):
            yield f"{key}: '{text}' has no {' or '.join(files)}. Expected {expected}."
    elif path.exists():
        yield f"{key}: '{text}' is a file. Expected {expected}."
    elif not hub or not HUB_NAME.fullmatch(text) or path.parent.is_dir():
        name = ", or a hub name like 'Qwen/Qwen3-0.6B'" if hub else ""
        yield f"{key}: there is no folder '{text}'.{_neighbour(path)} Expected {expected}{name}."


def _neighbour(path: Path) -> str:
    """`` Did you mean 'x'?`` where something of nearly that name lies in the same folder."""
    names = [str(path.parent / other.name) for other in path.parent.iterdir()] if path.parent.is_dir() else []
    match = nearest(str(path), names)
    return f" Did you mean '{match}'?" if match else ""


def stored_files(path: Path) -> list[Path]:
    """Return files of rollouts: the file itself, those of a folder by name, those of a run's steps."""
    if not path.is_dir():
        return [path]
    inner = path / "rollouts"
    return sorted((inner if inner.is_dir() else path).glob("*.parquet"))


def data_problems(
    data: DataConfig, held_out: Sequence[EvalSetConfig] = (), stored: bool = False
) -> Iterator[str]:
    """Yield a problem for each file that is missing, empty, of an unknown kind, or has unusable rows.

    Args:
        data: ``[data]``.
        held_out: ``[[eval.set]]``.
        stored: `data.train` names files of rollouts, folders of them, and runs.
    """
    sets = ((f"eval.set.{each.name}.path", each.path) for each in held_out)
    for key, value in (("data.train", data.train), ("data.validation", data.validation), *sets):
        for file in files_of(value):
            try:
                if stored and key == "data.train":
                    yield from _stored_problems(key, Path(file))
                else:
                    yield from _file_problems(key, Path(file), data)
            except OSError as error:
                yield f"{file}: cannot be read: {error.strerror}."


def _stored_problems(key: str, path: Path) -> Iterator[str]:
    files = stored_files(path)
    if not path.exists():
        yield f"{key}: there is no file or folder '{path}'.{_neighbour(path)}"
    elif not files:
        yield f"{key}: '{path}' holds no Parquet file. Expected rollouts: a file, a folder of them, or a run."
    for file in files if path.exists() else ():
        if file.suffix != ".parquet":
            yield f"{key}: '{file}' has the ending '{file.suffix}'. Expected a Parquet file of rollouts."
        elif not _is_parquet(file):
            yield f"{file}: no Parquet file (it does not begin and end with PAR1). Was it cut off?"


def _file_problems(key: str, path: Path, data: DataConfig) -> Iterator[str]:
    kind = path.suffix.lower()
    if path.is_dir():
        yield f"{key}: '{path}' is a folder. Expected its files, each by name."
    elif not path.is_file():
        yield f"{key}: there is no file '{path}'.{_neighbour(path)}"
    elif path.stat().st_size == 0:
        yield f"{path}: empty. {key} needs at least one row."
    elif kind not in KINDS:
        yield f"{key}: '{path}' has the ending '{path.suffix}'. Expected one of {', '.join(KINDS)}."
    elif kind == ".parquet":
        if not _is_parquet(path):
            yield f"{path}: no Parquet file (it does not begin and end with PAR1). Was it cut off?"
    elif kind != ".json" or not _is_array(path):
        yield from _row_problems(path, _csv(path) if kind == ".csv" else _jsonl(path), data)


def _row_problems(path: Path, rows: Rows, data: DataConfig) -> Iterator[str]:
    """Yield the rows that cannot be used, if they are more than allowed."""
    bad, empty = [], True
    for line, row in rows:
        empty = False
        if problem := row if isinstance(row, str) else _column_problem(row, data):
            bad.append(f"{path}:{line}: {problem}")
    if empty:
        yield f"{path}: no rows."
    if len(bad) > data.max_bad_rows:
        yield from bad[:SHOWN]
        if len(bad) > SHOWN:
            yield f"{path}: {len(bad) - SHOWN} more rows like these. data.max_bad_rows = N skips up to N of them."


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
        try:
            row = json.loads(text.strip())
            wrong = None if isinstance(row, dict) else f"expected an object {{...}}, got {text.strip()[:40]}."
        except json.JSONDecodeError as error:
            wrong = f"no JSON: {error.msg}, column {error.colno}."
        except ValueError as error:  # a number of too many digits
            wrong = f"no JSON: {error}."
        except RecursionError:
            wrong = "no usable JSON: nested too deeply."
        yield line, _not_utf8(text) or wrong or row


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


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(0, path.stat().st_size - 4))
        return start == file.read(4) == b"PAR1"


def _is_array(path: Path) -> bool:
    """Return whether a JSON file is one list, which the loader reads."""
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"[")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of the lines in the checked part; a last line cut by the limit is left out.

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
