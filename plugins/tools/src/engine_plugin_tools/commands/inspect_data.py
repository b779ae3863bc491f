"""``engine inspect data``: what a run makes of its training rows."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from engine_core.cli.loading import load_trainer, placing, read
from engine_core.cli.options import AllowCode, Files, Json, Sets
from engine_core.cli.output import print_json
from engine_core.errors import ConfigError, DataError
from engine_core.redaction import harmless

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

ANY = 2**31
"""More unusable rows than a command looks at."""
MARKS = {True: ("\x1b[32m", "\x1b[0m"), False: ("⟦", "⟧")}
"""Before and after tokens that are learned: on a terminal with colors, elsewhere."""


def data(
    files: Files,
    row: Annotated[
        int | None,
        typer.Option("--row", min=0, metavar="N", help="Show this row alone; the first is 0, as in ids."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=0, metavar="N", help="Show at most that many rows.")
    ] = 3,
    check: Annotated[
        int, typer.Option("--check", min=1, metavar="N", help="Prepare that many rows, from the first on.")
    ] = 1000,
    sets: Sets = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Show training rows as the run reads them: text, number of tokens, what is learned, rows that are skipped and why.

    Tokens that a trainer such as sft learns are green, or between brackets without colors. The prompts of a sampling
    trainer have none: there the responses are learned.

    Example: engine inspect data run.toml --row 7

    Raises:
        ConfigError: the row does not exist.
        DataError: the trainer learns from stored rollouts.
    """
    # only this command counts unusable rows: it shows them all
    config = read(files, [*(sets or ()), f"data.max_bad_rows={ANY}"], allow_code=allow_code)
    with closing(load_trainer(config)) as trainer, placing(config):
        trainer.load_inputs()
        source, tokenizer = trainer.source, trainer.tokenizer
        total = sum(file["rows"] for file in source.state()["files"])
        if row is not None and row >= total:
            raise ConfigError(f"--row {row}: the data has {total} rows, 0 to {total - 1}.")
        looked = itertools.islice(source.outcomes(row or 0), 1 if row is not None else check)
        found = [describe(number, *each) for number, each in enumerate(looked, row or 0)]
    usable = [each for each in found if "sequences" in each]
    shown = usable if row is not None else usable[:limit]
    skipped = [each for each in found if "skipped" in each]
    lengths = [len(ids) for each in usable for _, ids, _ in each["sequences"]]
    tokens = {"min": min(lengths), "mean": statistics.fmean(lengths), "max": max(lengths)} if lengths else {}
    if as_json:
        rows = [as_record(each, tokenizer) for each in shown]
        print_json(
            {"rows": rows, "skipped": skipped, "tokens": tokens, "checked": len(found), "total": total}
        )
        return
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for each in shown:
        print("\n".join(text_of(each, tokenizer, color)))
    for each in skipped:
        print(harmless(f"skipped row {each['row']} ({each['skipped']}): {each['why']}"))
    if row is None:
        lengths_text = (
            f", {tokens['min']} to {tokens['max']} tokens, mean {tokens['mean']:.1f}" if tokens else ""
        )
        print(
            f"{len(found)} of {total} rows prepared: {len(usable)} usable, {len(skipped)} skipped{lengths_text}"
        )


def describe(number: int, where: str, outcome: Any) -> dict[str, Any]:
    """Return a row as ``{row, where}`` with ``skipped`` and ``why``, or with its ``sequences``: name, ids, mask or None.

    Raises:
        DataError: the item is none that has tokens.
    """
    about = {"row": number, "where": where}
    item = outcome.item
    if item is None:
        return about | {"skipped": outcome.kind, "why": outcome.problem}
    sequences = [
        (name, getattr(item, f"{name}ids"), getattr(item, f"{name}mask"))
        for name in ("chosen_", "rejected_")
        if hasattr(item, f"{name}ids")
    ]
    if hasattr(item, "token_ids"):
        sequences = [("", list(item.token_ids), getattr(item, "loss_mask", None))]
    if not sequences:
        raise DataError("The trainer learns from stored rollouts. Show them: engine inspect rollouts RUN.")
    return about | {"sequences": sequences, "columns": getattr(item, "columns", {})}


def as_record(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return a row with its sequences as plain values: text, ids, mask, counts."""
    sequences = [
        {
            "name": name.rstrip("_"),
            "text": tokenizer.decode(ids),
            "tokens": len(ids),
            "learned": None if mask is None else sum(map(bool, mask)),
            "token_ids": ids,
            "loss_mask": None if mask is None else [bool(each) for each in mask],
        }
        for name, ids, mask in row["sequences"]
    ]
    return {**row, "sequences": sequences}


def text_of(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, color: bool) -> Iterator[str]:
    """Yield the lines of a row: place and counts, the text with its learned parts marked, other columns."""
    before, after = MARKS[color]
    for name, ids, mask in row["sequences"]:
        learned = "" if mask is None else f", {sum(map(bool, mask))} learned"
        side = f" {name.rstrip('_')}" if name else ""
        yield harmless(f"--- row {row['row']}, {row['where']}{side}: {len(ids)} tokens{learned}")
        parts = []
        pairs = zip(ids, mask or [False] * len(ids), strict=True)
        for marked, run in itertools.groupby(pairs, key=lambda pair: bool(pair[1])):
            text = harmless(cast(str, tokenizer.decode([token for token, _ in run])))
            parts.append(f"{before}{text}{after}" if marked else text)
        yield "".join(parts)
    if columns := {name: value for name, value in row["columns"].items() if name != "messages"}:
        yield harmless("columns: " + ", ".join(f"{name} = {value!r:.200}" for name, value in columns.items()))
