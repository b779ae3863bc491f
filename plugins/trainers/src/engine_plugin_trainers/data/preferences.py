"""Rows of preferences: a better and a worse response to one prompt, or one response judged good or bad.

A pair has the columns prompt, chosen and rejected. Without the column prompt, chosen and rejected are conversations,
and their common beginning is the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_core.config.models import ColumnsConfig
from engine_core.data.layouts import Message, Row, column, shown, text_or_messages, tools_of
from engine_core.data.rows import BadRow
from engine_core.errors import DataError, did_you_mean
from engine_plugin_trainers.data.examples import ExamplePreparer


@dataclass(slots=True)
class Pair:
    """Two sequences of one prompt: ``Pair("train:3", [5, 9, 7, 1], [0, 0, 1, 1], [5, 9, 8, 1], [0, 0, 1, 1])``."""

    id: str
    chosen_ids: list[int]
    chosen_mask: list[bool]  # True on the tokens of the response
    rejected_ids: list[int]
    rejected_mask: list[bool]
    margin: float = 0.0  # target difference of the two scores


@dataclass(slots=True)
class Judged:
    """A sequence and its label: ``Judged("train:3", [5, 9, 7, 1], [0, 0, 1, 1], True)``."""

    id: str
    token_ids: list[int]
    loss_mask: list[bool]  # True on the tokens of the response
    desirable: bool


class PairPreparer(ExamplePreparer):
    """A preparer of `Pair`s; both sequences of a pair are cut or skipped together."""

    makes: type = Pair

    def _item(self, raw: dict[str, Any], index: int, name: str) -> Any:
        if self.config.format not in ("auto", "trl"):
            raise DataError(
                f"[data] format = '{self.config.format}': pairs are read from the columns prompt, chosen and rejected. "
                "Remove the key."
            )
        columns = self.config.columns
        sides, margin = convert_pair(raw, columns), margin_of(raw, columns)
        for side in sides:
            side.columns["tools"] = tools_of(raw, columns)
        chosen, rejected = (self._renderer.fit(side, self.limit) for side in sides)
        masked = chosen.token_ids, chosen.loss_mask, rejected.token_ids, rejected.loss_mask
        return Pair(name, *masked, margin)


class JudgedPreparer(PairPreparer):
    """A preparer of `Judged` responses: any layout of SFT and a label."""

    makes = Judged

    def _item(self, raw: dict[str, Any], index: int, name: str) -> Any:
        rendered = self._renderer.fit(self._row(raw, index), self.limit)
        label = label_of(raw, self.config.columns)
        return Judged(name, rendered.token_ids, rendered.loss_mask, label)


def convert_pair(row: Mapping[str, Any], columns: ColumnsConfig) -> tuple[Row, Row]:
    """Return the chosen and the rejected side of ``row``, each with the prompt.

    Raises:
        BadRow: a column is missing or has the wrong type, the responses are the same, or no prompt is found.
    """
    sides = [
        text_or_messages(column(row, name, key), name)
        for name, key in ((columns.chosen, "chosen"), (columns.rejected, "rejected"))
    ]
    if sides[0] == sides[1]:
        raise BadRow(f"'{columns.chosen}' and '{columns.rejected}' are the same")
    prompt: str | list[Message] | None = None
    if row.get(columns.prompt) is not None:
        prompt = text_or_messages(row[columns.prompt], columns.prompt)
    chosen, rejected = sides
    if isinstance(chosen, str) or isinstance(rejected, str):
        if prompt is None:
            raise BadRow(
                f"no column '{columns.prompt}' ([data.columns] prompt), and in text the end of the prompt is not "
                f"known.{did_you_mean(columns.prompt, row)}"
            )
        return Row(prompt, chosen), Row(prompt, rejected)
    if isinstance(prompt, list):
        own = [side[len(prompt) :] if side[: len(prompt)] == prompt else side for side in (chosen, rejected)]
        return Row(prompt, own[0]), Row(prompt, own[1])
    if prompt is None or chosen[0]["role"] != "assistant":  # the conversations hold the prompt
        shared = _shared(chosen, rejected)
        return Row(chosen[:shared], chosen[shared:]), Row(rejected[:shared], rejected[shared:])
    turns = [{"role": "user", "content": prompt}]
    return Row(turns, chosen), Row(turns, rejected)


def margin_of(row: Mapping[str, Any], columns: ColumnsConfig) -> float:
    """Return by how much the chosen response is better, in units of the score; 0 without the column.

    Raises:
        BadRow: the value is not a finite number, or a column that `[data.columns]` names is missing.
    """
    value = row.get(columns.margin)
    if value is None:
        if columns.margin != ColumnsConfig().margin:
            column(row, columns.margin, "margin")
        return 0.0
    number = _number(value)
    if number is None:
        raise BadRow(f"column '{columns.margin}' must be a finite number, got {shown(value)}")
    return number


def label_of(row: Mapping[str, Any], columns: ColumnsConfig) -> bool:
    """Return whether the response of ``row`` is desirable: true or false, 1 or 0, also as text.

    Raises:
        BadRow: the column is missing or holds something else.
    """
    value = column(row, columns.label, "label")
    number = (
        _number(value.lower().replace("true", "1").replace("false", "0")) if isinstance(value, str) else value
    )
    if number not in (0, 1):
        raise BadRow(f"column '{columns.label}' must be true or false, got {shown(value)}")
    return bool(number)


def _shared(chosen: list[Message], rejected: list[Message]) -> int:
    """Return the number of first messages that two conversations share.

    Raises:
        BadRow: the conversations do not answer the same prompt.
    """
    count = 0
    while count < min(len(chosen), len(rejected)) and chosen[count] == rejected[count]:
        count += 1
    if count == 0:
        raise BadRow("chosen and rejected share no first message, and no column holds their prompt")
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        if count == len(turns):
            raise BadRow(f"{name} is only the beginning of the other conversation")
        if turns[count]["role"] != "assistant":
            raise BadRow(
                f"{name}[{count}] is where the two conversations differ, and it is not the assistant's: "
                "they answer different prompts"
            )
    return count


def _number(value: Any) -> float | None:
    """Return ``value`` as a finite number, also from text, which is all that CSV has; None if it is not one."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
