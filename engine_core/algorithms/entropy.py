"""Entropy as a setting: a bonus whose weight adapts, and the choice of high-entropy tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class AdaptiveEntropy:
    """A weight of the entropy bonus that keeps the mean entropy from falling under a target.

    It moves after each step, and is applied only while the entropy last measured was at most the target.

    Formula: ``coef <- max(coef + delta, 0)`` where the entropy was below the target, else ``max(coef - delta, 0)``
    Paper: https://arxiv.org/abs/2505.22312

    Args:
        coef: where it starts.
        below: whether the entropy last measured was at most the target; True before the first.
    """

    coef: float
    below: bool = True

    @property
    def applied(self) -> float:
        """The weight of this step."""
        return self.coef if self.below else 0.0

    def update(self, entropy: float, target: float, delta: float) -> None:
        """Move after a step that measured ``entropy``."""
        self.coef = max(self.coef + (delta if entropy < target else -delta), 0.0)
        self.below = entropy <= target


def high_entropy(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """The tokens with the highest entropy, which alone are learned from.

    Formula: tokens whose entropy is at least that of the ``share n``-th highest of n
    Paper: https://arxiv.org/abs/2506.01939
    Differs: the bound is over the whole mini-batch (a quantile of each micro-batch would depend on the split)

    Args:
        entropy: [T] of the whole mini-batch, before its update.
        mask: [T] bool, the loss tokens.
        share: of the loss tokens, rounded up; ties at the bound are all kept.

    Returns:
        [T] bool.
    """
    values = entropy[mask]
    if not len(values):
        return mask
    kept = max(math.ceil(share * len(values)), 1)
    bound = values.topk(kept).values[-1]
    return mask & (entropy >= bound)
