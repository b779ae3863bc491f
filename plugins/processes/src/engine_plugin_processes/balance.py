"""Balance of work over ranks: the cost of a sequence, and partitions of sequences into parts of nearly equal cost."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

from engine_core.packing import units_by_size


def partition(
    costs: Sequence[float], parts: int, keep_together: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Balance work over ranks: each sequence, the costliest first, goes to the part with the least cost so far.

    The heaviest part is at most ``4/3 - 1/(3 * parts)`` times the optimum (Graham, Bounds on multiprocessing timing
    anomalies, 1969), and within a percent of it for many sequences. The same input gives the same partition on all
    ranks.

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
    lightest = [(0.0, part) for part in range(parts)]
    found: list[list[int]] = [[] for _ in lightest]
    for size, members in units_by_size(costs, keep_together):
        cost, part = lightest[0]
        found[part] += members
        heapq.heapreplace(lightest, (cost + size, part))
    return sorted(map(sorted, found), key=lambda members: (not members, members))


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
