"""How a metric is reduced, declared where the metric is emitted.

A number of the trainer declares the reduction by its type: the largest ``Max`` and the total of ``Sum`` are kept, of any other
float the mean. An objective declares it in the name, because its metrics are tensors that come from micro-batches and ranks:
``max/NAME`` is a maximum over tokens, any other name a mean over tokens, weighted by each token's share of the mini-batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = "max/"


class Max(float):
    """A metric whose largest value is kept."""


class Sum(float):
    """A metric that is summed: a count."""


def is_largest(name: str) -> bool:
    """Return whether an objective's metric of this name is a maximum; else it is a sum."""
    return name.startswith(LARGEST)


def over_tokens(values: Mapping[str, Tensor], share: Tensor) -> dict[str, Tensor]:
    """Reduce an objective's metrics over the tokens of a micro-batch.

    Args:
        values: [T] each; not read where ``share`` is 0.
        share: [T] each token's share of the mini-batch.
    """
    reduced = {}
    for name, value in values.items():
        held = value.detach().where(share > 0, value.new_zeros(()))
        largest = held.max() if len(held) else held.sum()
        reduced[name] = largest if is_largest(name) else (share * held).sum()
    return reduced


def merge(total: dict[str, Any], new: Mapping[str, Any], largest: Callable[..., Any] = max) -> None:
    """Add an objective's metrics of one more micro-batch, or part of a mini-batch, to those of the others.

    Args:
        total: changed in place.
        new: numbers or tensors.
        largest: maximum of two of them; of tensors ``torch.maximum``.
    """
    for name, value in new.items():
        if name not in total:
            total[name] = value
        else:
            total[name] = largest(total[name], value) if is_largest(name) else total[name] + value


def declared(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return an objective's metrics of a mini-batch under the names of ``metrics.jsonl``, maxima as ``Max``."""
    return {
        name.removeprefix(LARGEST): Max(value) if is_largest(name) else value
        for name, value in metrics.items()
    }


def over_updates(updates: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Reduce the metrics of a step's optimizer steps; one that only some of them have is of these."""
    found: dict[str, list[float]] = {}
    for metrics in updates:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    rules: dict[type, Callable[[list[float]], float]] = {Max: max, Sum: sum}
    return {name: rules.get(type(values[0]), statistics.fmean)(values) for name, values in found.items()}
