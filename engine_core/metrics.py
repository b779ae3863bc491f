"""Reduction of metrics, declared where a metric is emitted.

A metric of the trainer declares its reduction by type: ``Max`` is reduced to the maximum, ``Sum`` to the sum, any other
float to the mean. Metrics of an objective are tensors from micro-batches and ranks and declare it by name: ``max/NAME``
is a maximum over tokens, any other name a mean over tokens, weighted by each token's share of the mini-batch.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = "max/"


class Max(float):
    """A metric that is reduced to its maximum."""


class Sum(float):
    """A metric that is reduced to its sum, such as a count."""


def is_largest(name: str) -> bool:
    """Return whether an objective's metric of this name is a maximum; any other is a sum of weighted values."""
    return name.startswith(LARGEST)


def with_prefix(prefix: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put ``prefix`` before the names of an objective's metrics, [T] each; ``max/`` stays in front of it."""
    return {
        f"{LARGEST}{prefix}{name.removeprefix(LARGEST)}" if is_largest(name) else prefix + name: value
        for name, value in values.items()
    }


def over_tokens(values: Mapping[str, Tensor], share: Tensor) -> dict[str, Tensor]:
    """Reduce an objective's metrics over the tokens of a micro-batch.

    Args:
        values: metrics by name, [T] each; entries with ``share`` 0 are ignored.
        share: [T], each token's share of the mini-batch.

    Returns:
        The reduced metrics; a maximum over no token is -inf.
    """
    reduced = {}
    for name, value in values.items():
        held = value.detach()
        if is_largest(name):
            least = share.new_full((), -math.inf)
            reduced[name] = held.to(share).where(share > 0, least).max() if len(held) else least
        else:
            reduced[name] = (share * held.where(share > 0, held.new_zeros(()))).sum()
    return reduced


def merge(total: dict[str, Any], new: Mapping[str, Any], largest: Callable[..., Any] = max) -> None:
    """Add an objective's metrics of one more micro-batch, or of a part of a mini-batch, to the total.

    Args:
        total: metrics so far, changed in place.
        new: metrics to add, numbers or tensors.
        largest: function that returns the maximum of two values; ``torch.maximum`` for tensors.
    """
    for name, value in new.items():
        if name not in total:
            total[name] = value
        else:
            total[name] = largest(total[name], value) if is_largest(name) else total[name] + value


def declared(metrics: Mapping[str, float], role: str = "actor") -> dict[str, float]:
    """Return an objective's metrics under their names in ``metrics.jsonl``, maxima as ``Max``; over no token 0.

    Args:
        metrics: by the names of the objective.
        role: the trained role, whose name replaces ``actor`` in ``actor/...``.
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        logged = re.sub("^actor/", f"{role}/", name.removeprefix(LARGEST))
        found[logged] = Max(0.0 if value == -math.inf else value) if is_largest(name) else value
    return found


def over_updates(updates: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Reduce metrics over the optimizer steps of a step; a metric is reduced over the steps that have it."""
    found: dict[str, list[float]] = {}
    for metrics in updates:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    rules: dict[type, Callable[[list[float]], float]] = {Max: max, Sum: sum}
    return {name: rules.get(type(values[0]), statistics.fmean)(values) for name, values in found.items()}
