"""Sequences into micro-batches of bounded size. No torch here: a plan is lists of numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def plan_micro_batches(
    lengths: Sequence[int],
    budget: int,
    keep_together: Sequence[Hashable] | None = None,
    count: int = 0,
) -> list[list[int]]:
    """First-fit-decreasing bins: the longest first, each into the first bin that has room.

    The same input gives the same plan everywhere, so ranks need not talk about it.

    Args:
        lengths: [B] tokens of each sequence.
        budget: most tokens of one micro-batch; a longer sequence (or group) has one of its own.
        keep_together: [B] ids; sequences that share one are never split.
        count: the plan is filled up to this many micro-batches with empty ones, for ranks that must
            all run the same number: plan, take the largest count over ranks, plan again with it.

    Returns:
        Positions in ``lengths``, ascending inside a bin; bins by their first position.
    """
    if budget <= 0:
        raise ValueError(f"The token budget of a micro-batch is {budget}; it must be at least 1.")
    bins: list[list[int]] = []
    room: list[int] = []
    first_open = 0  # bins before it are full
    for size, members in _units_by_size(lengths, keep_together):
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


def _units_by_size(
    lengths: Sequence[int], keep_together: Sequence[Hashable] | None
) -> list[tuple[int, list[int]]]:
    """What may not be split, with its tokens: the largest first, then by first position."""
    ids = range(len(lengths)) if keep_together is None else keep_together
    units: dict[Hashable, list[int]] = {}
    for index, name in zip(range(len(lengths)), ids, strict=True):
        units.setdefault(name, []).append(index)
    sized = [(sum(lengths[i] for i in members), members) for members in units.values()]
    return sorted(sized, key=lambda unit: (-unit[0], unit[1][0]))
