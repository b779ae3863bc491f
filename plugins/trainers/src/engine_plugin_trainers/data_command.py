"""``engine data``: the public data sets, and copies of them in files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from engine_core.cli.output import check_new, print_table
from engine_core.errors import ConfigError, did_you_mean
from engine_plugin_trainers.datasets.loading import commit_of, rows_of
from engine_plugin_trainers.datasets.table import SETS, PublicSet

BATCH_ROWS = 1000  # rows that are written at a time
SPLITS = ("train", "validation")


def data(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="A data set; default: list all.")] = "",
    out: Annotated[
        Path | None,
        typer.Argument(metavar="[OUT]", help="New folder for train.parquet and validation.parquet."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            metavar="FOLDER",
            help="Folder with the files of the hub repository; default: the hub.",
        ),
    ] = None,
    split: Annotated[
        Literal["train", "validation"] | None,
        typer.Option("--split", help="Write this split alone; default: both, where the set has both."),
    ] = None,
) -> None:
    """List the public data sets, or show how a run file uses one; with OUT, also write its rows as Parquet files.

    The output for one set is a part of a run file: comments with license, revision and number of rows, then the keys.

    Example: engine data ultrafeedback

    Raises:
        ConfigError: no data set has this name.
    """
    if not name:
        print_table([line(name, chosen) for name, chosen in SETS.items()], HEADER)
        return
    if name not in SETS:
        raise ConfigError(f"There is no data set '{name}'.{did_you_mean(name, SETS)}")
    files = write(name, out, source, [split] if split else SPLITS) if out else {}
    print("\n".join(run_file(name, SETS[name], files, source)))


HEADER = ("name", "license", "train", "validation", "trainers", "reward", "url")


def line(name: str, chosen: PublicSet) -> tuple[str, ...]:
    """Return the cells of a data set under ``HEADER``."""
    rows = [f"{chosen.rows[split]:,}" if split in chosen.rows else "-" for split in SPLITS]
    return (
        name,
        chosen.license,
        *rows,
        ", ".join(chosen.trainers) or "eval",
        chosen.reward or "-",
        chosen.url,
    )


def write(name: str, out: Path, source: Path | None, splits: Sequence[str]) -> dict[str, tuple[Path, int]]:
    """Write the rows of the splits that the set has as Parquet files.

    Returns:
        File and number of rows by split.

    Raises:
        ConfigError: ``out`` exists, ``source`` does not, or the set has none of the splits.
        DataError: the set cannot be read; nothing is written.
    """
    chosen = SETS[name]
    has = [split for split in splits if getattr(chosen, split)]
    if not has:
        raise ConfigError(f"--split {splits[0]}: {chosen.repo} has no such split. Remove the option.")
    if source and not source.is_dir():
        raise ConfigError(f"--source: there is no folder '{source}'.")
    check_new(out)
    folder = str(source) if source else None
    rows = {split: rows_of(name, split, folder=folder) for split in has}
    out.mkdir(parents=True, exist_ok=True)
    for split in has:
        write_parquet(rows[split], out / f"{split}.parquet")
    return {split: (out / f"{split}.parquet", len(rows[split])) for split in has}


def write_parquet(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write rows in parts. The first part decides the types; a column that is empty there is text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def part(first: int, schema: pa.Schema | None) -> pa.Table:
        last = min(first + BATCH_ROWS, len(rows))
        return pa.Table.from_pylist([rows[number] for number in range(first, last)], schema=schema)

    fields = part(0, None).schema
    schema = pa.schema(
        [field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in fields]
    )
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for first in range(0, len(rows), BATCH_ROWS):
            writer.write_table(part(first, schema))


def run_file(
    name: str, chosen: PublicSet, files: Mapping[str, tuple[Path, int]], source: Path | None
) -> list[str]:
    """Return the lines of a run file that uses a data set: its files, or without files the data source."""
    revision = (commit_of(str(source)) or f"unknown, files of '{source}'") if source else chosen.revision
    lines = [
        f"# {name}: {chosen.content}",
        f"# license: {chosen.license}",
        f"# revision: {revision}",
        f"# {chosen.url}",
    ]
    lines += [f"# {file}: {count:,} rows" for file, count in files.values()]
    if not chosen.train:
        path = files["validation"][0].as_posix() if files else "OUT/validation.parquet"
        held = [f"name = {json.dumps(name)}", f"path = {json.dumps(path)}"]
        held += [] if files else [f"# written by: engine data {name} OUT"]
        return [*lines, "[[eval.set]]", *held]
    others = f"  # or {', '.join(chosen.trainers[1:])}" if chosen.trainers[1:] else ""
    lines += [f'trainer = "{chosen.trainers[0]}"{others}', "", "[data]"]
    lines += [f"{split} = {json.dumps(file.as_posix())}" for split, (file, _) in files.items()]
    lines += [] if files else [f'source = "{name}"']
    if chosen.pairs:
        lines.append(f'# for kto: source = "{name}", and unpaired = true in [data.{name}]')
    if chosen.reward:
        lines += [
            "chat_template = true  # not for a base model",
            "",
            "[[reward]]  # not for sft",
            f'name = "{chosen.reward}"',
        ]
    return lines
