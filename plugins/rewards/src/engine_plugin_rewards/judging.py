"""The parts that all judges share: the question, filled in with one sample, and the verdict in what a model wrote."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine_core.config.rewards import PLACEHOLDER

if TYPE_CHECKING:
    from engine_core.config.rewards import WrittenVerdict

NUMBER = r"-?\d+(?:\.\d+)?"
QUESTION = "question"


def columns_of(template: str) -> tuple[str, ...]:
    """Return what a question names, apart from the last message of the user."""
    return tuple(name for name in dict.fromkeys(PLACEHOLDER.findall(template)) if name != QUESTION)


def filled(template: str, sample: Mapping[str, Any]) -> str | None:
    """Fill in a question, each value once and unchanged; return None if a value is missing.

    Args:
        template: the question.
        sample: the values by name. The question is the last message of the user in ``messages``, else ``prompt``.
    """
    values = {name: sample.get(name) for name in columns_of(template)}
    if any(value is None for value in values.values()):
        return None
    asked = [m["content"] for m in sample.get("messages") or () if m["role"] == "user"]
    values[QUESTION] = asked[-1] if asked else sample.get("prompt")
    return PLACEHOLDER.sub(lambda found: _shown(values[found[1]]), template)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


class VerdictReader:
    """A reader that finds the verdict in a judge's answer.

    Args:
        config: ``pattern``, ``verdicts``, ``scale``.
    """

    def __init__(self, config: WrittenVerdict) -> None:
        self.values = {word.casefold(): value for word, value in config.verdicts.items()}
        self.scale = config.scale
        longest_first = sorted(config.verdicts, key=len, reverse=True)
        words = rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
        own = config.pattern or (words if self.values else NUMBER)
        self.pattern = re.compile(own, re.IGNORECASE if self.values else 0)

    def read(self, text: str) -> float | None:
        """Return the value of the last verdict in ``text``; None without a verdict, or for one out of bounds."""
        found = None
        for found in self.pattern.finditer(text):  # noqa: B007
            pass
        if found is None:
            return None
        said = ((found[1] if self.pattern.groups else found[0]) or "").strip()
        if self.values:
            return self.values.get(said.casefold())
        value = float(said) if re.fullmatch(NUMBER, said) else math.nan
        if self.scale is None:
            return value if math.isfinite(value) else None
        low, high = self.scale
        return (value - low) / (high - low) if low <= value <= high else None
