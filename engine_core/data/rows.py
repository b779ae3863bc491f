"""Random access to rows by number: ``Rows(files).row(17)`` and ``.where(17)`` ("train.jsonl:18").

Parquet files are converted to memory-mapped Arrow files. JSONL is read line by line at known offsets. CSV files and JSON
lists are in memory.
Readers of libraries refuse a whole file for one bad line and force all rows into one schema. Here a bad line
is one bad row that messages name, and rows may have different columns.
"""

from __future__ import annotations

import bisect
import csv
import hashlib
import itertools
import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.inputs import (
    MAX_ROW_BYTES,
    BadRow,
    as_row,
    csv_reader,
    file_problem,
    files_of,
    json_row,
)
from engine_core.config.models import MixPart
from engine_core.errors import DataError
from engine_core.temporary_folder import TemporaryFolder

if TYPE_CHECKING:
    from engine_core.config.models import DataConfig

BATCH_ROWS = 1024  # rows of Parquet that are read at a time


class MemoryRows:
    """A sequence of rows in memory or memory-mapped: a list of dicts, or a ``datasets.Dataset``.

    Args:
        rows: any sequence of dicts.
        name: name of the file of the rows, for messages.
        unit: noun for a row in messages.
        lines: the line of each row in its file, if known.
    """

    digest = ""  # SHA-256 of rows that no file holds, if known

    def __init__(
        self, rows: Sequence[Any], name: str = "rows in memory", unit: str = "row", lines: Sequence[int] = ()
    ) -> None:
        self.rows, self.name, self.unit, self.lines = rows, name, unit, lines

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> dict[str, Any]:
        """Return row ``index``.

        Raises:
            BadRow: the row is no dict, or a value is too long.
        """
        row = as_row(self.rows[index])
        for column, value in row.items():
            if isinstance(value, str | bytes) and len(value) > MAX_ROW_BYTES:
                raise BadRow(f"column '{column}' is longer than {MAX_ROW_BYTES:,} bytes")
        return row

    def where(self, index: int) -> str:
        """Return the location of row ``index``, for messages."""
        return f"{self.name}:{self.lines[index]}" if self.lines else f"{self.name}, {self.unit} {index}"


class JsonLines:
    """A JSONL file, one object per line, read by offset; blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.starts, self.lines = array("Q"), array("Q")
        offset, line, fresh = 0, 1, True
        with path.open("rb") as file:
            while piece := file.readline(MAX_ROW_BYTES):  # bounded, because a file may be one very long line
                if fresh and piece.strip():
                    self.starts.append(offset)
                    self.lines.append(line)
                offset += len(piece)
                fresh = piece.endswith(b"\n")
                line += fresh

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, index: int) -> dict[str, Any]:
        """Read row ``index``.

        Raises:
            BadRow: the line is too long, or not a JSON object in UTF-8.
        """
        with self.path.open("rb") as file:
            file.seek(self.starts[index])
            line = file.readline(MAX_ROW_BYTES + 1)
        if len(line) > MAX_ROW_BYTES:
            raise BadRow(f"the line is longer than {MAX_ROW_BYTES:,} bytes")
        return json_row(line)

    def where(self, index: int) -> str:
        """Return the location of row ``index``: ``train.jsonl:18``."""
        return f"{self.name}:{self.lines[index]}"


class Rows:
    """The rows of several files as one sequence, numbered from 0.

    Args:
        files: paths, or rows in memory.
        cache: folder of the Arrow files that another process made of these files; default: make them, in a temporary
            folder that is removed with this object.

    Raises:
        DataError: a file is absent, empty, of an unknown kind or unreadable as a whole.
    """

    def __init__(self, files: Sequence[str | MemoryRows], cache: str | None = None) -> None:
        self._given = [file if isinstance(file, MemoryRows) else Path(file) for file in files]
        self.paths = [file for file in self._given if isinstance(file, Path)]
        self.cache = cache or ""
        if not self.cache and any(path.suffix == ".parquet" for path in self.paths):
            self._folder = TemporaryFolder("data-")
            self.cache = self._folder.path
        self.files = [
            _open(file, Path(self.cache, f"{number}.arrow")) if isinstance(file, Path) else file
            for number, file in enumerate(self._given)
        ]
        #: number of the first row of each file, then the number of rows
        self.starts = list(itertools.accumulate((len(file) for file in self.files), initial=0))
        #: weight and row numbers of each part; more than one are a mix
        self.parts = [(1.0, range(len(self)))]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row ``index``; {} if it cannot be read."""
        try:
            return self.row(index)
        except BadRow:
            return {}

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the file that holds row ``index``, and the row's number in that file."""
        file = bisect.bisect_right(self.starts, index) - 1
        return file, index - self.starts[file]

    def row(self, index: int) -> dict[str, Any]:
        """Return row ``index``; raises `BadRow` if it cannot be read."""
        file, local = self.locate(index)
        return self.files[file].row(local)

    def where(self, index: int) -> str:
        """Return the location of row ``index``, for messages: ``train.jsonl:18``."""
        file, local = self.locate(index)
        return self.files[file].where(local)

    def fingerprint(self) -> list[dict[str, Any]]:
        """Return name, number of rows and SHA-256 of each file; rows passed from Python have no hash."""
        prints: list[dict[str, Any]] = [{"file": file.name, "rows": len(file)} for file in self.files]
        for entry, given in zip(prints, self._given, strict=True):
            if isinstance(given, Path):
                with given.open("rb") as file:
                    entry["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
            elif given.digest:
                entry["sha256"] = given.digest
        return prints


def open_rows(
    config: DataConfig, split: str, rows: Sequence[Any] | MemoryRows | Mapping[str, MemoryRows] | None
) -> Rows:
    """Return the rows of a split.

    Args:
        config: ``[data]``.
        split: ``train`` or ``validation``.
        rows: rows passed from Python or of a data source; of a mix, those of its sources by name; None: read the files
            of ``[data]``.

    Raises:
        DataError: there are no rows, or a file cannot be read.
    """
    if isinstance(rows, MemoryRows):
        return Rows([rows])
    if rows is not None and not isinstance(rows, Mapping):
        if len(rows) == 0:
            raise DataError(f"The {split} data passed from Python has 0 rows.")
        return Rows([MemoryRows(rows)])
    parts = config.parts if split == "train" else [MixPart(weight=1, path=config.validation)]
    files = [[(rows or {})[part.source]] if part.source else files_of(part.path) for part in parts]
    if not any(files):
        raise DataError(f"[data] {split} names no file.")
    opened = Rows([file for each in files for file in each])
    bounds = itertools.pairwise(itertools.accumulate(map(len, files), initial=0))
    ranges = [range(opened.starts[first], opened.starts[end]) for first, end in bounds]
    opened.parts = [(part.weight, numbers) for part, numbers in zip(parts, ranges, strict=True)]
    return opened


def _open(path: Path, arrow: Path) -> MemoryRows | JsonLines:
    """Open a file with the reader for its suffix; refuse a file without rows."""
    if problem := file_problem(path):
        raise DataError(f"[data] {problem}")
    readers = {".jsonl": _open_json, ".json": _open_json, ".parquet": _open_parquet, ".csv": _open_csv}
    file = readers[path.suffix.lower()](path, arrow)
    if len(file) == 0:
        raise DataError(f"[data] '{path}' has 0 rows.")
    return file


def _open_json(path: Path, arrow: Path) -> MemoryRows | JsonLines:
    with path.open("rb") as file:
        first = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first != b"[":
        return JsonLines(path)
    try:
        return MemoryRows(json.loads(path.read_text("utf-8-sig")), path.name, "item")
    except (ValueError, RecursionError) as error:
        raise DataError(f"[data] '{path}' begins as a JSON list and is not one: {error}.") from error


class ArrowRows(Sequence[dict[str, Any]]):
    """The rows of a memory-mapped Arrow file."""

    def __init__(self, file: Path) -> None:
        import pyarrow as pa

        self._table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]


def _open_parquet(path: Path, arrow: Path) -> MemoryRows:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        if not arrow.is_file():
            source = pyarrow.parquet.ParquetFile(path, memory_map=True)
            # an Arrow file has one dictionary of a column's categories, Parquet one in each row group: store the values
            types = [field.type for field in source.schema_arrow]
            types = [each.value_type if pa.types.is_dictionary(each) else each for each in types]
            schema = pa.schema(list(zip(source.schema_arrow.names, types, strict=True)))
            with pa.OSFile(str(arrow), "wb") as out, pa.ipc.new_file(out, schema) as writer:
                for batch in source.iter_batches(BATCH_ROWS):
                    writer.write_batch(batch.cast(schema))
        return MemoryRows(ArrowRows(arrow), path.name)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise DataError(f"[data] '{path}' cannot be read: {error}.") from error


def _open_csv(path: Path, arrow: Path) -> MemoryRows:
    """Read a CSV file. Values stay text: "007" and "NA" are answers, not a number and a null.

    Raises:
        DataError: the file is not UTF-8 or not CSV, or a row does not fit the header; names the line.
    """
    header: list[str] = []
    rows, lines = list[dict[str, str]](), list[int]()
    line = 1
    # Undecodable bytes become lone surrogates, which encode() refuses at a known line.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv_reader(file)
        try:
            for row in reader:
                "".join(row).encode()
                if row and not header:
                    header = row
                elif row:
                    if len(row) != len(header):
                        raise csv.Error(f"{len(row)} fields where the header has {len(header)}")
                    rows.append(dict(zip(header, row, strict=True)))
                    lines.append(line)
                line = reader.line_num + 1
        except UnicodeEncodeError as error:
            raise DataError(f"[data] {path}:{line}: not valid UTF-8. Save the file as UTF-8.") from error
        except csv.Error as error:
            raise DataError(f"[data] {path}:{line}: not valid CSV ({error}).") from error
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise DataError(f"[data] '{path}' has more than one column '{twice[0]}'.")
    return MemoryRows(rows, path.name, lines=lines)
