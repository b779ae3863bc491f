"""The order of the rows: a seeded permutation in each epoch, or a mix of parts by weight.

The order of an epoch is a function of the parts, the seed and the epoch, so a position in it needs no further state. Each part of a
mix has an endless sequence of rows: one permutation of the part after another. An epoch takes the next rows of each
sequence, as many as the weight of the part gives, and interleaves the parts. So no row of a part repeats before all
rows of the part have come, in however many epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_core.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def shares(parts: Sequence[tuple[float, range]]) -> list[int]:
    """Return how many rows of an epoch come from each part; an epoch has as many rows as the parts together.

    The rows that are left after rounding down go to the parts with the largest remainders, of equal ones to the first.

    Args:
        parts: weight and row numbers of each part.

    Raises:
        DataError: a part would give no row.
    """
    total, weights = sum(len(rows) for _, rows in parts), np.array([weight for weight, _ in parts])
    exact = total * weights / weights.sum()
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    if not counts.all():
        few = f"part {counts.argmin()} with weight {weights[counts.argmin()]:g} gives none of the {total} rows of an epoch"
        raise DataError(f"[data] mix: {few}. Raise its weight, or remove the part.")
    return [int(count) for count in counts]


def order_of(parts: Sequence[tuple[float, range]], seed: int | None, epoch: int) -> NDArray[Any]:
    """Return the row numbers of an epoch in their order.

    Args:
        parts: weight and row numbers of each part; one part is no mix.
        seed: seed of the order; None: rows in the order of the files, parts evenly interleaved.
        epoch: number of the epoch, from 0.

    Returns:
        [N] int64; N is the number of rows of all parts.
    """
    if len(parts) == 1:
        return _turn(len(parts[0][1]), seed, epoch)
    counts = shares(parts)
    owners = np.repeat(np.arange(len(parts)), counts)  # [N]
    if seed is None:
        owners = owners[np.argsort(np.concatenate([(np.arange(n) + 0.5) / n for n in counts]), kind="stable")]
    else:
        owners = np.random.default_rng([seed, epoch]).permutation(owners)
    order = np.empty(len(owners), dtype=np.int64)
    for part, ((_, rows), count) in enumerate(zip(parts, counts, strict=True)):
        first, skipped = divmod(epoch * count, len(rows))
        turns = range(first, first + (skipped + count - 1) // len(rows) + 1)
        sequence = np.concatenate([_turn(len(rows), seed, turn, part + 1) for turn in turns])
        order[owners == part] = rows.start + sequence[skipped : skipped + count]
    return order


def _turn(size: int, seed: int | None, *numbers: int) -> NDArray[Any]:
    return np.arange(size) if seed is None else np.random.default_rng([seed, *numbers]).permutation(size)
