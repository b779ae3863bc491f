"""Balance of work over ranks: the cost of a sequence, and partitions of sequences into parts of nearly equal cost."""

from __future__ import annotations

import bisect
import heapq
import operator
from collections.abc import Hashable, Sequence

from engine_core.packing import units_by_size

FIRST = operator.itemgetter(0)


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
        for number, (size, members) in enumerate(units_by_size(costs, keep_together))
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
