"""Regularizers of a policy: KL estimators, adaptive coefficients of KL and entropy, selection of high-entropy tokens.

The KL(policy || reference) is estimated from the log-probs of sampled tokens.

With ``d = log policy - log reference`` (http://joschu.net/blog/kl-approx.html):

========= ======================================= ====================================================
estimator formula                                 what it is
========= ======================================= ====================================================
k1        ``d``                                   Unbiased, noisy, may be negative
abs       ``|d|``                                 A distance, no estimate of the KL
k2        ``d^2 / 2``                             Biased; its gradient is the right one on policy
k3        ``exp(-d) - 1 + d``                     Unbiased, never negative
k1+       value ``d``, gradient of k2             Unbiased, with the right gradient on policy
k3+       value ``exp(-d) - 1 + d``, gradient of  Unbiased, never negative, with the right gradient on
          k2                                      policy
========= ======================================= ====================================================

Differs (k3): the exponent is held within 20 (verl: 20 of d, then the result within 10)
Differs (k3+): the exponent is held within 20

As a loss on policy, the gradient of k1 is 0 in expectation and that of k3 is the gradient of the
forward KL(reference || policy). Hence ``k1+`` and ``k3+``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "k3+")


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Return an estimate of the KL at each token.

    Args:
        log_probs: [T] of the policy.
        ref_log_probs: [T] of the reference, for the same tokens.
        estimator: one of ``ESTIMATORS``. The exponent of k3 is clamped to -20..20, so that one token
            cannot overflow the batch.

    Returns:
        [T], in nats.

    Raises:
        ValueError: the estimator is unknown.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"Unknown KL estimator '{estimator}'. Known: {', '.join(ESTIMATORS)}.")
    d = log_probs - ref_log_probs
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return 0.5 * d * d
    if estimator == "k3":
        return torch.exp((-d).clamp(-20.0, 20.0)) - 1 + d
    value, k2 = kl_estimate(log_probs, ref_log_probs, estimator.removesuffix("+")), 0.5 * d * d
    return value.detach() + (k2 - k2.detach())


@dataclass
class AdaptiveKL:
    """A coefficient that keeps the KL at a target.

    It changes after each step, in proportion to n, the number of the step's rollouts (section 2.2 of the paper).

    Formula: ``coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) min(n / horizon, 1))``
    Paper: https://arxiv.org/abs/1909.08593
    Differs: the target is of the mean KL of a token, the paper's is of a whole response; n counts as at most the horizon

    Args:
        coef: start value, above 0 (a coefficient of 0 stays 0).
    """

    coef: float

    def update(self, kl: float, target: float, horizon: float, num_rollouts: int) -> None:
        """Change the coefficient after a step with mean KL ``kl``."""
        error = min(max(kl / target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(num_rollouts / horizon, 1.0)


@dataclass
class AdaptiveEntropy:
    """A weight of the entropy bonus that keeps the mean entropy from falling below a target.

    It changes after each step, and is applied only while the last measured entropy is at most the target.

    Formula: ``coef <- max(coef + delta, 0)`` where the entropy was below the target, else ``max(coef - delta, 0)``
    Paper: https://arxiv.org/abs/2505.22312

    Args:
        coef: start value.
        below: whether the last measured entropy was at most the target; True before the first measurement.
    """

    coef: float
    below: bool = True

    @property
    def applied(self) -> float:
        """Weight of the entropy bonus in this step."""
        return self.coef if self.below else 0.0

    def update(self, entropy: float, target: float, delta: float) -> None:
        """Change the weight after a step with mean entropy ``entropy``."""
        self.coef = max(self.coef + (delta if entropy < target else -delta), 0.0)
        self.below = entropy <= target


def high_entropy(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """Learning only from the tokens with the highest entropy.

    Formula: tokens whose entropy is at least that of the ``share n``-th highest of n
    Paper: https://arxiv.org/abs/2506.01939
    Differs: the bound is over the whole mini-batch (a quantile of each micro-batch would depend on the split)

    Args:
        entropy: [T] of the whole mini-batch, before its update.
        mask: [T] bool, the loss tokens.
        share: share of the loss tokens to keep, rounded up; ties at the bound are all kept.

    Returns:
        [T] bool, True at the tokens to learn from.
    """
    values = entropy[mask]
    if not len(values):
        return mask
    kept = max(math.ceil(share * len(values)), 1)
    bound = values.topk(kept).values[-1]
    return mask & (entropy >= bound)
