"""Divisors for numbers of ranks, and the advice in messages about a number that does not divide (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence


def divisors(size: int) -> list[int]:
    """Return the divisors of ``size`` in ascending order."""
    return [n for n in range(1, size + 1) if size % n == 0]


def nearest_fit(asked: int, fits: Sequence[int]) -> str:
    """Return the advice to set a number to the nearest one that fits; the smaller of two equally near."""
    near = min(fits, key=lambda n: (abs(n - asked), n))
    every = "" if len(fits) == 1 else f" (one of {', '.join(str(n) for n in fits)})"
    return f"Set it to {near}{every}."
