"""The distributions that a sampler may draw from: every correct cut by temperature, top-k and top-p.

Top-p keeps the most likely tokens until their probabilities sum up to it. Two things are not exact in floating point,
and no other deviation is accepted of an engine that computes in float32:

* the sum, if it comes within ``EDGE`` of top-p: a sampler may find it reached one token earlier or later;
* the order of tokens whose probabilities are equal but for rounding (``TIED``). A sampler that searches for a
  threshold, as vLLM's kernel does (18 halvings of the range of probabilities), cannot separate such tokens: it keeps
  all of them or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine_core.types import Sampling

CUTTING: tuple[dict[str, Any], ...] = (
    {"top_k": 4},
    {"top_p": 0.7},
    {"top_k": 12, "top_p": 0.8, "temperature": 1.3},
)
"""Sampling options that cut the distribution: each alone, and all together at another temperature."""
SHARP: tuple[dict[str, Any], ...] = ({"top_k": 3}, {"top_p": 0.6})
"""Sampling options that leave few tokens."""
ONE: dict[str, Any] = {"temperature": 1.0, "top_k": 1}
"""Sampling options that leave the most likely token alone."""
GREEDY: tuple[dict[str, Any], ...] = tuple(
    {"temperature": 0.0, **more}
    for more in ({}, {"seed": 99}, {"top_p": 0.4}, {"top_k": 3}, {"top_k": 12, "top_p": 0.7})
)
"""Sampling options at temperature 0, where top-p and top-k change neither tokens nor log-probs."""

DRAWN: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 0.4, 0.8, 1.0, 1.0, 1.7),
    "top_p": (1.0, 1.0, 0.95, 0.6, 0.05),
    "top_k": (0, 0, 1, 3, 20, 200),
}
"""Values of these options in random requests."""

EDGE = 1e-3  # tolerance of a sum of probabilities (absolute), and of the order of two tokens (relative)
PRECISE = 1e-3  # a suite's tolerance for float32, in nats, at which EDGE holds
TIED = 1e-4  # relative difference of probabilities that a search for a threshold does not separate


@dataclass(frozen=True)
class Cut:
    """A distribution that tokens are sampled from."""

    log_probs: Tensor  # [V] float64, after temperature; -inf where cut
    log_mass: float  # log of the probability mass kept

    def keeps(self) -> set[int]:
        """Return the tokens that are left."""
        return set(self.log_probs.isfinite().nonzero().flatten().tolist())


def cuts(logits: Tensor, sampling: Sampling, tolerance: float = PRECISE) -> list[Cut]:
    """Return all correct cuts, the exact one first.

    Args:
        logits: [V].
        sampling: temperature (0 counts as 1), top-k, then top-p on what top-k left.
        tolerance: largest difference of a log-prob, in nats; above ``PRECISE``, ``EDGE`` grows in proportion.
    """
    edge = EDGE * max(tolerance / PRECISE, 1.0)
    probs = torch.softmax(logits.double() / (sampling.temperature or 1.0), -1)
    ranked, order = probs.sort(descending=True)
    most = min(sampling.top_k or len(ranked), len(ranked))
    left = ranked[:most] / ranked[:most].sum()
    counts = _counts(left, sampling.top_p, edge) if sampling.top_p < 1 else [most]
    found = []
    for count in dict.fromkeys(counts):
        for kept in _first(order, ranked, count, edge):
            mass = probs[kept].sum()
            log_probs = torch.full_like(probs, -torch.inf)
            log_probs[kept] = (probs[kept] / mass).log()
            found.append(Cut(log_probs, float(mass.log())))
    return found


def _counts(left: Tensor, top_p: float, edge: float) -> list[int]:
    """Return the numbers of most likely tokens that top-p may keep.

    Args:
        left: [N] probabilities, descending.
        top_p: below 1.
        edge: tolerance of a sum.
    """
    sums = left.cumsum(0)
    exact = max(int((sums - left < top_p).sum()), 1)
    counts = [exact]
    counts += [n for n in range(1, exact) if float(sums[n - 1]) > top_p - edge]
    counts += [n for n in range(exact + 1, len(left) + 1) if float(sums[n - 2]) < top_p + edge]
    border = float(left[exact - 1])
    above, down_to = int((left > border * (1 + TIED)).sum()), int((left >= border * (1 - TIED)).sum())
    if down_to - above > 1:
        counts += [down_to, *([above] if above else [])]
    return counts


def _first(order: Tensor, ranked: Tensor, count: int, edge: float) -> Iterator[Tensor]:
    """Yield the ``count`` most likely tokens; then, for each other token as likely as the last of them, with these swapped.

    Args:
        order: [V] token ids, the most likely first.
        ranked: [V] their probabilities.
        edge: tolerance of the order, relative.
    """
    yield order[:count]
    for at in range(count, len(order)):
        if float(ranked[count - 1]) >= (1 + edge) * float(ranked[at]):
            break
        yield torch.cat([order[: count - 1], order[at : at + 1]])
