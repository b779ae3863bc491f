"""Packing of sequences into micro-batches of bounded size. A plan is lists of indices; torch is not imported."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)


def plan_micro_batches(
    lengths: Sequence[int],
    budget: int,
    keep_together: Sequence[Hashable] | None = None,
    count: int = 0,
) -> list[list[int]]:
    """Plan micro-batches by first-fit decreasing: the longest sequence first, each into the first bin with room.

    The same input gives the same plan on all ranks, without communication.

    Args:
        lengths: [B], the tokens of each sequence.
        budget: maximum tokens of one micro-batch; a longer sequence (or group) gets a separate one.
        keep_together: [B] ids; sequences with equal ids are never separated.
        count: minimum number of micro-batches; empty ones are appended. All ranks must run the same
            number: plan, take the largest count over ranks, plan again with it.

    Returns:
        Indices into ``lengths``, ascending in each micro-batch; micro-batches by their first index.

    Raises:
        ValueError: ``budget`` is not positive.
    """
    if budget <= 0:
        raise ValueError(f"The token budget of a micro-batch is {budget}; it must be at least 1.")
    bins: list[list[int]] = []
    room: list[int] = []
    first_open = 0  # bins before it are full
    for size, members in units_by_size(lengths, keep_together):
        chosen = next((i for i in range(first_open, len(bins)) if room[i] >= size), None)
        if chosen is None:
            chosen = len(bins)
            bins.append([])
            room.append(budget)
        bins[chosen].extend(members)
        room[chosen] -= size
        while first_open < len(bins) and room[first_open] <= 0:
            first_open += 1
    plan = sorted(sorted(members) for members in bins)
    return plan + [[] for _ in range(count - len(plan))]


def units_by_size(
    lengths: Sequence[Number], keep_together: Sequence[Hashable] | None
) -> list[tuple[Number, list[int]]]:
    """Return the units that may not be split, each as (size, indices): the largest first, then by first index."""
    if keep_together is None:
        alone = [(length, [index]) for index, length in enumerate(lengths)]
        return sorted(alone, key=operator.itemgetter(0), reverse=True)  # stable: equal sizes keep their order
    units: dict[Hashable, list[int]] = {}
    for index, name in zip(range(len(lengths)), keep_together, strict=True):
        units.setdefault(name, []).append(index)
    sized = [(sum(lengths[i] for i in members), members) for members in units.values()]
    return sorted(sized, key=lambda unit: (-unit[0], unit[1][0]))
