"""The hooks of this plugin. Keep this module light: a run imports it before any model is built."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from engine_core import hookimpl
from engine_core.specs import DataSource, Options


class TemplateOptions(Options):
    """``[data.template_name]``: checked when the run file is read, shown by ``engine schema``."""

    count: int = Field(default=64, gt=0)
    """Rows of each split."""
    seed: int = 0
    """Another seed gives other rows."""


def template_name(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows of a split, the same ones in every call.

    Args:
        split: ``train`` or ``validation``.
        count: from the options.
        seed: from the options.

    Returns:
        A dict for each row: ``prompt``, and columns that rewards read.
    """
    draw = random.Random(f"{split} {seed}")
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


@hookimpl
def engine_data_sources() -> Mapping[str, DataSource]:
    return {"template_name": DataSource(load=template_name, config=TemplateOptions, license="CC0-1.0")}
