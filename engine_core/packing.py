"""Sequences into micro-batches of bounded size, and evenly over ranks. No torch here: a plan is lists of numbers."""

from __future__ import annotations

import bisect
import heapq
import operator
from collections.abc import Hashable, Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)
FIRST = operator.itemgetter(0)


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
    lengths: Sequence[Number], keep_together: Sequence[Hashable] | None
) -> list[tuple[Number, list[int]]]:
    """What may not be split, with its tokens or cost: the largest first, then by first position."""
    if keep_together is None:
        alone = [(length, [index]) for index, length in enumerate(lengths)]
        return sorted(alone, key=FIRST, reverse=True)  # which keeps the order of equal ones
    units: dict[Hashable, list[int]] = {}
    for index, name in zip(range(len(lengths)), keep_together, strict=True):
        units.setdefault(name, []).append(index)
    sized = [(sum(lengths[i] for i in members), members) for members in units.values()]
    return sorted(sized, key=lambda unit: (-unit[0], unit[1][0]))


def partition(
    costs: Sequence[float], parts: int, keep_together: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Work over ranks: the largest differencing method of Karmarkar and Karp, for any number of parts.

    The two partial solutions that are the least even are merged, heavy parts with light ones, until one is
    left. Its heaviest part is at most ``4/3 - 1/(3 * parts)`` times the lightest possible one (Michiels and
    others, Performance ratios of the Karmarkar-Karp differencing method, 2007), and mostly within a percent of it.

    The same input gives the same partition everywhere.

    Args:
        costs: [B] of each sequence, at least 0; see ``sequence_cost``.
        parts: how many; with more parts than sequences some are empty.
        keep_together: [B] ids; sequences that share one are never split.

    Returns:
        For each part positions in ``costs``, ascending; the parts by their first position, empty ones last.
    """
    if parts <= 0:
        raise ValueError(f"A batch cannot be split into {parts} parts; there must be at least 1.")
    # a partial solution: its parts as (-size, members), heaviest first, without empty ones. The heap gives the one of
    # the widest spread.
    solutions: list[tuple[float, int, list[tuple[float, list[int]]]]] = [
        (-size, number, [(-size, members)])
        for number, (size, members) in enumerate(_units_by_size(costs, keep_together))
    ]
    heapq.heapify(solutions)
    while len(solutions) > 1:
        _, number, heavy = heapq.heappop(solutions)
        _merge(heavy, solutions[0][2], parts)
        spread = heavy[0][0] - heavy[-1][0] if len(heavy) == parts else heavy[0][0]
        heapq.heapreplace(solutions, (spread, number, heavy))
    found = sorted(sorted(members) for _, members in solutions[0][2]) if solutions else []
    filled = [members for members in found if members]
    return filled + [[] for _ in range(parts - len(filled))]


def _merge(
    heavy: list[tuple[float, list[int]]], light: Sequence[tuple[float, list[int]]], parts: int
) -> None:
    """Put ``light`` into ``heavy``: the heaviest part of one to the lightest of the other, and so on.

    Only parts that get something move, so that a single sequence costs a search and no pass over all parts.
    """
    untouched = parts - len(light)
    meeting = heavy[untouched:]
    del heavy[untouched:]
    for place, part in enumerate(reversed(light)):
        if place < len(meeting):
            part = meeting[place][0] + part[0], [*meeting[place][1], *part[1]]
        bisect.insort_right(heavy, part, key=FIRST)


def sequence_cost(length: int, attention: float = 0.0) -> float:
    """Work of one sequence, in tokens through the weights: ``n + attention * n^2``."""
    return length + attention * length * length


def attention_share(layers: int, width: int, parameters: int) -> float:
    """``attention`` of ``sequence_cost``, from a model's shape.

    A token goes through every weight with 2 operations each, ``2 P n`` for a sequence. Causal attention
    multiplies queries with keys and weights with values, ``2 n^2 w`` operations each without the mask and half
    of it with: ``2 L w n^2`` in all. So the cost is ``n + (L w / P) n^2`` in units of ``2 P``; the backward
    pass doubles both.

    Args:
        layers: L, with attention.
        width: w, heads times the size of a head.
        parameters: P, of the whole model; of a mixture of experts those that one token meets.
    """
    return layers * width / max(parameters, 1)
