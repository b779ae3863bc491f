"""Rows of preferences: two responses of one prompt, a margin, a label.

A pair has the columns prompt, chosen and rejected; without a prompt, chosen and rejected are conversations
that begin alike, and what they share is the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine_core.config.models import ColumnsConfig
from engine_core.data.layouts import Message, Row, column_of, shown, text_or_messages
from engine_core.data.rows import BadRow
from engine_core.errors import did_you_mean


def convert_pair(row: Mapping[str, Any], columns: ColumnsConfig) -> tuple[Row, Row]:
    """The chosen and the rejected response of ``row``, after one prompt.

    Raises:
        BadRow: a column is missing or of the wrong type, the two are the same, or no prompt is to be found.
    """
    sides = [
        text_or_messages(column_of(row, name, key), name)
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
                f"no column '{columns.prompt}' ([data.columns] prompt), and of text it is not known where the "
                f"prompt ends.{did_you_mean(columns.prompt, row)}"
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
    """By how much the chosen response is better, in units of the score; 0 where no column says it.

    Raises:
        BadRow: it is not a finite number.
    """
    value = row.get(columns.margin)
    if value is None:
        if columns.margin != ColumnsConfig().margin:
            column_of(row, columns.margin, "margin")
        return 0.0
    number = _number(value)
    if number is None:
        raise BadRow(f"column '{columns.margin}' must be a finite number, got {shown(value)}")
    return number


def label_of(row: Mapping[str, Any], columns: ColumnsConfig) -> bool:
    """Whether the response of ``row`` is a desirable one: true or false, 1 or 0, also as text.

    Raises:
        BadRow: the column is missing or holds something else.
    """
    value = column_of(row, columns.label, "label")
    number = (
        _number(value.lower().replace("true", "1").replace("false", "0")) if isinstance(value, str) else value
    )
    if number not in (0, 1):
        raise BadRow(f"column '{columns.label}' must be true or false, got {shown(value)}")
    return bool(number)


def _shared(chosen: list[Message], rejected: list[Message]) -> int:
    """How many first messages two conversations share; raises `BadRow` where they do not answer one prompt."""
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
                f"{name}[{count}] is where the two conversations part, and it is not the assistant's: "
                "they answer different prompts"
            )
    return count


def _number(value: Any) -> float | None:
    """``value`` as a finite number, also from text (CSV has nothing else); None: it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
