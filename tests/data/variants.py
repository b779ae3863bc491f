"""Variants of one behaviour, of which a few run in ``make test`` and all in ``make test-full``."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def variants(names: Iterable[str], quick: Collection[str], values: Any = None) -> list[Any]:
    """Return parameters, one for each name; those that are not in ``quick`` are slow tests.

    Args:
        names: of all variants.
        quick: names that run in ``make test``.
        values: the parameter of each name; default: the name itself.
    """
    names = list(names)
    assert set(quick) <= set(names), f"unknown variants: {sorted(set(quick) - set(names))}"
    return [
        pytest.param(
            name if values is None else values[name],
            id=name,
            marks=() if name in quick else pytest.mark.slow,
        )
        for name in names
    ]
