"""Numbers of ranks that divide others, and what to say where one does not (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence


def divisors(size: int) -> list[int]:
    """1 to ``size``, those that divide it."""
    return [n for n in range(1, size + 1) if size % n == 0]


def nearest_fit(asked: int, fits: Sequence[int]) -> str:
    """What to set a number to instead: the nearest that fits, the smaller of two as near."""
    near = min(fits, key=lambda n: (abs(n - asked), n))
    every = "" if len(fits) == 1 else f" (one of {', '.join(str(n) for n in fits)})"
    return f"Set it to {near}{every}."
