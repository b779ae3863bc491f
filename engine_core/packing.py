"""Packing of sequences into micro-batches of bounded size, and balancing over ranks.

A plan is lists of indices; torch is not imported.
"""

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
    """Return the units that may not be split, each as (size, indices): the largest first, then by first index."""
    if keep_together is None:
        alone = [(length, [index]) for index, length in enumerate(lengths)]
        return sorted(alone, key=FIRST, reverse=True)  # stable: equal sizes keep their order
    units: dict[Hashable, list[int]] = {}
    for index, name in zip(range(len(lengths)), keep_together, strict=True):
        units.setdefault(name, []).append(index)
    sized = [(sum(lengths[i] for i in members), members) for members in units.values()]
    return sorted(sized, key=lambda unit: (-unit[0], unit[1][0]))


def partition(
    costs: Sequence[float], parts: int, keep_together: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Balance work over ranks by the largest differencing method of Karmarkar and Karp, for any number of parts.

    The two partial solutions with the largest spread are merged, heavy parts with light parts, until one solution is
    left. Its heaviest part is at most ``4/3 - 1/(3 * parts)`` times the optimum (Michiels et al., Performance
    ratios of the Karmarkar-Karp differencing method, 2007), and mostly within a percent of it.

    The same input gives the same partition on all ranks.

    Args:
        costs: [B], the cost of each sequence, at least 0; see ``sequence_cost``.
        parts: number of parts; with more parts than sequences some are empty.
        keep_together: [B] ids; sequences with equal ids are never separated.

    Returns:
        For each part its indices into ``costs``, ascending; parts by their first index, empty parts last.

    Raises:
        ValueError: ``parts`` is not positive.
    """
    if parts <= 0:
        raise ValueError(f"A batch cannot be split into {parts} parts; there must be at least 1.")
    # A partial solution is its non-empty parts as (-size, members), heaviest first. The heap returns the solution with
    # the largest spread.
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
    """Merge ``light`` into ``heavy``, in place: the heaviest part of one with the lightest of the other, and so on.

    Only parts that change are moved, so merging a single sequence needs one binary search.
    """
    untouched = parts - len(light)
    meeting = heavy[untouched:]
    del heavy[untouched:]
    for place, part in enumerate(reversed(light)):
        if place < len(meeting):
            part = meeting[place][0] + part[0], [*meeting[place][1], *part[1]]
        bisect.insort_right(heavy, part, key=FIRST)


def sequence_cost(length: int, attention: float = 0.0) -> float:
    """Return the cost of one sequence, in units of one token through the weights: ``n + attention * n^2``."""
    return length + attention * length * length


def attention_share(layers: int, width: int, parameters: int) -> float:
    """Return ``attention`` of ``sequence_cost`` for a model's shape.

    Each token costs 2 operations per weight, ``2 P n`` for a sequence. Causal attention multiplies queries by keys
    and attention weights by values, each ``2 n^2 w`` operations without the mask and half of that with it:
    ``2 L w n^2`` in total. So the cost is ``n + (L w / P) n^2`` in units of ``2 P``; the backward pass doubles both.

    Args:
        layers: L, the number of layers with attention.
        width: w, the number of heads times the head size.
        parameters: P, of the whole model; of a mixture of experts those active for one token.
    """
    return layers * width / max(parameters, 1)
