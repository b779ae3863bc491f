"""Estimators of KL(policy || reference) from the log-probs of sampled tokens.

http://joschu.net/blog/kl-approx.html, with ``d = log policy - log reference``:
k1 ``d`` (unbiased, noisy), k2 ``d^2 / 2`` (biased, its gradient is the right one on policy),
k3 ``exp(-d) - 1 + d`` (unbiased, never negative).

As a loss on policy, the gradient of k1 is 0 in expectation and that of k3 is the gradient of the
forward KL(reference || policy).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Estimate the KL at each token.

    Args:
        log_probs: [T] of the policy.
        ref_log_probs: [T] of the reference, same tokens.
        estimator: ``k1``, ``k2`` or ``k3``. k3's exponent is held within 20, so that one token
            cannot overflow the batch.

    Returns:
        [T], natural log.
    """
    d = log_probs - ref_log_probs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d * d
    if estimator == "k3":
        return torch.exp((-d).clamp(-20.0, 20.0)) - 1 + d
    raise ValueError(f"Unknown KL estimator '{estimator}'. Known: k1, k2, k3.")
