"""Cheap tests of the files that a run names: there, readable, rows with the columns that are asked for.

Of JSONL the first ``SCAN_BYTES`` are looked at, of CSV the header, with the standard library alone; the loader
tests every row when it reads it. Parquet and JSON lists are only recognised here.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.choices import OPTIONAL_ROLES
from engine_core.config.models import ColumnsConfig, DataConfig, EngineConfig
from engine_core.config.read import key_text
from engine_core.errors import did_you_mean, near

if TYPE_CHECKING:
    from _csv import Reader as CSVReader

    from engine_core.config.evaluation import EvalSetConfig

HEADER_BYTES = 100_000_000  # largest header of a safetensors file
MAX_ROW_BYTES = 8 * 2**20
"""Limit of one line of JSONL or one value of Parquet and CSV; a longer one is a broken file."""
SCAN_BYTES = 1_000_000  # of JSONL; about 50 ms a file
SHOWN = 5  # problems reported for one file

KINDS = (".jsonl", ".json", ".csv", ".parquet")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_MODEL = ("config.json",)
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def files_of(value: str | list[str]) -> list[str]:
    """Return the files of ``data.train``, of ``data.validation`` or of a part of ``data.mix``."""
    return [file for file in ([value] if isinstance(value, str) else value) if file]


def model_tables(config: EngineConfig) -> dict[str, Any]:
    """Return the tables that name a model, by their keys: those of roles and of models of rewards."""
    roles = {role: getattr(config, role) for role in ("model", "actor", *OPTIONAL_ROLES)}
    tables = {role: table for role, table in roles.items() if table is not None}
    for reward in config.reward:
        tables |= {key_text(("reward", reward.name, kind)): table for kind, table in reward.models.items()}
    return tables


def model_problems(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and the problem of each model or tokenizer folder that is absent or holds no model."""
    for at, holder in model_tables(config).items():
        if holder.path:
            yield from _folder_problem(
                f"{at}.path", holder.path, _MODEL, "the folder that save_pretrained wrote"
            )
        if (lora := getattr(holder, "lora", None)) and lora.path:
            wanted = "an adapter folder of peft or of `engine export --adapter`"
            yield from _folder_problem(
                f"{at}.lora.path", lora.path, ("adapter_config.json",), wanted, hub=False
            )
        if hasattr(holder, "tokenizer"):
            wanted = f"a tokenizer there, or {at}.tokenizer set"
            if holder.tokenizer:
                yield from _folder_problem(f"{at}.tokenizer", holder.tokenizer, _TOKENIZER, wanted)
            elif holder.path and Path(holder.path).is_dir():
                yield from _folder_problem(f"{at}.path", holder.path, _TOKENIZER, wanted)
    teacher = config.teacher
    if teacher and teacher.path and Path(teacher.path).is_dir():
        wanted = "the teacher's tokenizer there, to compare it with the student's"
        yield from _folder_problem("teacher.path", teacher.path, _TOKENIZER, wanted)


def _folder_problem(
    key: str, text: str, files: tuple[str, ...], expected: str, hub: bool = True
) -> Iterator[tuple[str, str]]:
    path = Path(text)
    if path.is_dir():
        if not any((path / file).is_file() for file in files):
            yield key, f"'{text}' has no {' or '.join(files)}. Expected {expected}."
        elif files == _MODEL:
            yield from ((key, problem) for problem in _damage(path))
    elif path.exists():
        yield key, f"'{text}' is a file. Expected {expected}."
    elif not hub or not HUB_NAME.fullmatch(text) or path.parent.is_dir():
        name = ", or a hub name like 'Qwen/Qwen3-0.6B'" if hub else ""
        yield key, f"there is no folder '{text}'.{_neighbour(path)} Expected {expected}{name}."


def _damage(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the config and the weights of a model folder, as the headers of the files show."""
    try:
        whole = isinstance(json.loads((folder / "config.json").read_text("utf-8")), dict)
    except ValueError:
        whole = False
    if not whole:
        yield f"'{folder / 'config.json'}' is no JSON object. Download or write the model again."
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(length) if length <= min(size, HEADER_BYTES) else b""
        try:
            tensors = [value for name, value in json.loads(header).items() if name != "__metadata__"]
            expected = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            yield f"'{file}' ({size} bytes) is cut off or no safetensors file. Download or write the model again."
            continue
        if size != expected:
            yield f"'{file}' has {size} bytes, and its header says {expected}: was it cut off? Download or write it again."


def absent(path: str | Path) -> str:
    """Return the problem of a path at which nothing is, with what has nearly that name there."""
    return f"there is no file or folder '{path}'.{_neighbour(Path(path))}"


def _neighbour(path: Path) -> str:
    """`` Did you mean 'x'?`` where something of nearly that name lies in the same folder."""
    names = [str(path.parent / other.name) for other in path.parent.iterdir()] if path.parent.is_dir() else []
    return near(str(path), names)


def stored_files(path: Path) -> list[Path]:
    """Return files of rollouts: the file itself, those of a folder by name, those of a run's steps."""
    if not path.is_dir():
        return [path]
    inner = path / "rollouts"
    return sorted((inner if inner.is_dir() else path).glob("*.parquet"))


def data_problems(
    data: DataConfig, held_out: Sequence[EvalSetConfig] = (), stored: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield a problem for each file that is missing, empty, of an unknown kind, or has unusable rows.

    A problem is the key to blame and a text; without a key the text names the file itself.

    Args:
        data: ``[data]``.
        held_out: ``[[eval.set]]``.
        stored: `data.train` names files of rollouts, folders of them, and runs.
    """
    sets = ((f"eval.set.{each.name}.path", each.path) for each in held_out)
    own = [("data.mix" if data.mix else "data.train", part.path) for part in data.parts]
    for key, value in (*own, ("data.validation", data.validation), *sets):
        for file in files_of(value):
            try:
                if stored and key == "data.train":
                    yield from _stored_problems(key, Path(file))
                else:
                    yield from _file_problems(key, Path(file), data)
            except OSError as error:
                yield key, f"'{file}' cannot be read: {error.strerror}."


def _stored_problems(key: str, path: Path) -> Iterator[tuple[str, str]]:
    if not path.exists():
        yield key, absent(path)
    elif not stored_files(path):
        yield key, f"'{path}' holds no Parquet file. Expected rollouts: a file, a folder of them, or a run."
    for file in stored_files(path) if path.exists() else ():
        if file.suffix != ".parquet":
            yield key, f"'{file}' has the ending '{file.suffix}'. Expected a Parquet file of rollouts."
        elif not _is_parquet(file):
            yield "", f"{file}: no Parquet file (it does not begin and end with PAR1). Was it cut off?"


def file_problem(path: Path) -> str | None:
    """Return why a file of rows cannot be opened, as far as its name and its ends show; None if it can be."""
    if path.is_dir():
        return f"'{path}' is a folder. Expected its files, each by name."
    if not path.is_file():
        return f"there is no file '{path}'.{_neighbour(path)}"
    if path.stat().st_size == 0:
        return f"'{path}' is empty (0 bytes). Expected at least one row."
    if path.suffix.lower() not in KINDS:
        return f"'{path}' has the ending '{path.suffix}'. Expected one of {', '.join(KINDS)}."
    if path.suffix.lower() == ".parquet" and not _is_parquet(path):
        return f"'{path}' is no Parquet file (it does not begin and end with PAR1). Was it cut off?"
    return None


def _file_problems(key: str, path: Path, data: DataConfig) -> Iterator[tuple[str, str]]:
    if problem := file_problem(path):
        yield key, problem
    elif path.suffix.lower() == ".csv":
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv_reader(file)
            try:
                header, first = next(reader, []), next(reader, None)
            except csv.Error as error:
                yield "", f"{path}: not valid CSV ({error})."
                return
        if first is None:
            yield "", f"{path}: no rows."
        elif problem := _column_problem(header, data):
            yield "", f"{path}:1: {problem}"
    elif path.suffix.lower() == ".jsonl":
        bad = list(_bad_lines(path, data))
        if len(bad) > data.max_bad_rows:
            kinds: dict[str, str] = {}  # each problem, with the first row that has it
            for problem in bad:
                kinds.setdefault(problem.partition(": ")[2], problem)
            shown = list(kinds.values())[:SHOWN]
            yield from (("", problem) for problem in shown)
            if more := len(bad) - len(shown):
                yield "", f"{path}: {more} more rows like these. data.max_bad_rows = N skips up to N of them."


def csv_reader(file: Iterable[str]) -> CSVReader:
    """Return a strict reader of CSV for values of up to ``MAX_ROW_BYTES`` characters; Python's own limit is 128 KiB."""
    csv.field_size_limit(max(MAX_ROW_BYTES, csv.field_size_limit()))
    return csv.reader(file, strict=True)


def _bad_lines(path: Path, data: DataConfig) -> Iterator[str]:
    """Yield a problem for each line of the looked-at part that is no row; a last line cut by the limit is left out."""
    with path.open("rb") as file:
        content = file.read(SCAN_BYTES)
    lines = content.split(b"\n")
    if not content.strip():
        yield f"{path}: no rows."
    for number, line in enumerate(lines if path.stat().st_size <= SCAN_BYTES else lines[:-1], 1):
        try:
            problem = _column_problem(json_row(line), data) if line.strip() else None
        except BadRow as error:
            problem = f"{error}."
        if problem:
            yield f"{path}:{number}: {problem}"


class BadRow(Exception):
    """A row cannot be used; the message is the reason, without the location."""


def json_row(line: bytes) -> dict[str, Any]:
    """Return the row in a line of JSONL.

    Raises:
        BadRow: the line is not a JSON object in UTF-8.
    """
    try:
        return as_row(json.loads(line.decode("utf-8-sig").strip()))
    except UnicodeDecodeError as error:
        byte, column = error.object[error.start], error.start + 1
        raise BadRow(
            f"not valid UTF-8 (byte 0x{byte:02x} at column {column}); save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise BadRow(f"not valid JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number with too many digits, too many brackets
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise BadRow(f"not valid JSON ({what})") from error


def as_row(value: Any) -> dict[str, Any]:
    """Return a value that is a dict; raises `BadRow` for any other."""
    if not isinstance(value, dict):
        raise BadRow(f"a row must be an object of columns, got {type(value).__name__}")
    return value


def _column_problem(row: Collection[str], data: DataConfig) -> str | None:
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


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(0, path.stat().st_size - 4))
        return start == file.read(4) == b"PAR1"
