"""The gap between the sampling policy and the trained policy: metrics, importance weights and masks.

The two policies are the same weights in two programs (or, off policy, two versions of the weights). With
``s = p_old / p_rollout`` at each sampled token and p_old the trained policy before this step's updates:

==================== ===================================================== ================================
key                  formula                                               paper
==================== ===================================================== ================================
level = token        weight ``min(s, cap)``                                TIS, https://fengyao.notion.site/off-policy-rl
level = sequence     weight ``min(prod_t s_t, cap)``                       TIS, https://fengyao.notion.site/off-policy-rl
mask = token         only tokens with ``low <= s <= high``                 IcePop, arXiv:2510.18855
mask = sequence      only sequences with ``low <= prod_t s_t <= high``
mask = geometric     only sequences with
                     ``low <= exp(mean_t log s_t) <= high``
reject = k1          only sequences with
                     ``abs(mean_t log s_t) <= log reject_ratio``
reject = k2          only sequences with ``mean_t (log s_t)^2 / 2`` at
                     most its value at ``reject_ratio``
reject = k3          only sequences with ``mean_t (s_t - 1 - log s_t)``
                     at most its value at ``reject_ratio``
off_policy_threshold no token with ``A < 0`` in a sequence with            OPSM, arXiv:2512.02556
                     ``mean_t (log p_rollout - log p) > threshold``
==================== ===================================================== ================================

Differs (reject = k1): bounds are on s (verl tests the bounds of its k1 rejection on -log s, so there "0.5 to 4" keeps 0.25 to 2)
Differs (mask = token): a masked token keeps its place in the denominator of the mean, as an update from it would be 0

With token weights, ``mask = token`` is IcePop; with sequence weights, ``mask = sequence`` is MIS. A
weight multiplies the loss after the clip and has no gradient.

If top-p or top-k cut the distribution to a support S, the sampler drew from ``q = p_rollout / p_rollout(S)``.
With the column ``support_ids`` all log-probs are over S (``Batch.from_rollouts(replay=True)``): s is
``p_old(token | S) / q`` and its mean over q is 1. Without that column both log-probs are over the whole vocabulary
(``rollout_log_probs + support_log_mass``): the mean of s is 1 if the policies agree, else ``p_old(S) / p_rollout(S)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch

MASK_BOUNDS = {"token": (0.5, 5.0), "sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}
"""Of r, where none are set: IcePop's, and those of sequence masks in use."""
CAP = 2.0
"""Upper bound of a weight, where none is set and no mask bounds it."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The correction of the gap: the keys of ``[algorithm.correction]``.

    Args:
        level: weights per ``token``, per ``sequence``, or ``off``.
        cap: upper bound of the weights; None: the upper bound of a mask of the same level, else 2.
        mask: ``off``, ``token``, ``sequence`` or ``geometric``.
        mask_low: lower bound of r; None: ``MASK_BOUNDS``.
        mask_high: upper bound of r; None: ``MASK_BOUNDS``.
        reject: ``off``, ``k1``, ``k2`` or ``k3``.
        reject_ratio: above 1; the bound is the estimator's value at this r.
        off_policy_threshold: threshold of the off-policy mask in nats per token; None is off.
    """

    level: str = "off"
    cap: float | None = None
    mask: str = "off"
    mask_low: float | None = None
    mask_high: float | None = None
    reject: str = "off"
    reject_ratio: float = 1.1
    off_policy_threshold: float | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the mask."""
        low, high = MASK_BOUNDS[self.mask]
        return self.mask_low or low, self.mask_high or high

    @property
    def weight_cap(self) -> float:
        """Upper bound of the weights."""
        if self.cap is not None:
            return self.cap
        return self.bounds[1] if self.mask == self.level != "off" else CAP


def importance_weights(batch: Batch, log_ratio: Tensor, correction: Correction) -> Tensor | None:
    """Return the truncated importance weights, without gradient.

    Args:
        batch: the sequences.
        log_ratio: [T] from ``rollout_log_ratio``.
        correction: ``level`` and ``cap``.

    Returns:
        [T], or None for ``off``; multiplied by ``correction_scale`` [T] if the batch has it.
    """
    if correction.level == "off":
        return None
    weights = untruncated(batch, log_ratio, correction).clamp(max=correction.weight_cap)
    return weights * batch["correction_scale"] if "correction_scale" in batch else weights


def untruncated(batch: Batch, log_ratio: Tensor, correction: Correction) -> Tensor:
    """Return the ratio r [T] of each token, or of its sequence if ``level`` says so, within e^-20..e^20."""
    if correction.level == "sequence":
        log_ratio = batch.to_tokens(batch.sum_by_sequence(log_ratio))
    return log_ratio.clamp(-20.0, 20.0).exp()


def kept_tokens(batch: Batch, log_ratio: Tensor, correction: Correction) -> Tensor | None:
    """Return the tokens that mask and rejection keep.

    Args:
        batch: ``loss_mask`` [T].
        log_ratio: [T] from ``rollout_log_ratio``.
        correction: ``mask`` and ``reject``.

    Returns:
        [T] bool, or None if both are off.
    """
    kept = None
    if correction.mask != "off":
        low, high = (math.log(bound) for bound in correction.bounds)
        measured = log_ratio
        if correction.mask != "token":
            total = batch.sum_by_sequence(log_ratio)
            measured = batch.to_tokens(total if correction.mask == "sequence" else total / _counts(batch))
        kept = (measured >= low) & (measured <= high)
    if correction.reject != "off":
        measured = _divergence(log_ratio, correction.reject)
        mean = batch.to_tokens((batch.sum_by_sequence(measured) / _counts(batch)).abs())
        at = torch.tensor(math.log(correction.reject_ratio), dtype=mean.dtype, device=mean.device)
        near = mean <= _divergence(at, correction.reject).abs()
        kept = near if kept is None else kept & near
    return kept


def left_behind(batch: Batch, current: Tensor, threshold: float) -> Tensor:
    """Return the tokens with ``A < 0`` in sequences that the policy has moved away from (OPSM).

    Off-policy sequence masking is from DeepSeek-V3.2, https://arxiv.org/abs/2512.02556. It selects sequences with
    ``mean_t(log pi_rollout - log pi) > threshold``. Tokens with ``A >= 0`` are kept at any distance.

    Args:
        batch: ``advantages``, ``rollout_log_probs``, ``loss_mask``, each [T].
        current: [T] log-probs of the policy in training.
        threshold: in nats per token.

    Returns:
        [T] bool: True where the loss is dropped.
    """
    log_ratio = rollout_log_ratio(batch, current)
    gone = -batch.sum_by_sequence(log_ratio) / _counts(batch) > threshold
    return batch.to_tokens(gone) & (batch["advantages"] < 0)


def normalizing_scale(batch: Batch, log_probs: Tensor, correction: Correction) -> Tensor:
    """Return the factor, [T] with one value, that gives the weights of a mini-batch the mean 1 over kept tokens.

    Args:
        batch: the whole mini-batch, before its update.
        log_probs: [T] of the trained policy before this step's updates.
        correction: weights and masks of tokens.
    """
    log_ratio = rollout_log_ratio(batch, log_probs)
    weights = importance_weights(batch, log_ratio, correction)
    kept = kept_tokens(batch, log_ratio, correction)
    counted = batch["loss_mask"] if kept is None else batch["loss_mask"] & kept
    if weights is None or not bool(counted.any()):
        return torch.ones_like(log_ratio)
    return torch.ones_like(log_ratio) / weights[counted].mean()


def mismatch_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """Return metrics of the gap, each [T]: ``kl`` (k3: r - log r - 1), ``mean_abs`` and ``max_abs`` of log r."""
    gap = log_ratio.abs()
    return {
        "mismatch/kl": _divergence(log_ratio, "k3"),
        "mismatch/mean_abs": gap,
        "max/mismatch/max_abs": gap,
    }


def rollout_log_ratio(batch: Batch, log_probs: Tensor) -> Tensor:
    """Return ``log pi - log pi_rollout`` at loss tokens, [T] without gradient; 0 elsewhere."""
    gap = log_probs.detach() - batch["rollout_log_probs"]
    return torch.where(batch["loss_mask"], gap, torch.zeros_like(gap))


def _divergence(log_ratio: Tensor, estimator: str) -> Tensor:
    """Return the estimate k1, k2 or k3 of KL(pi_rollout || pi) at each token, from log r."""
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio * log_ratio
    return torch.expm1(log_ratio.clamp(-20.0, 20.0)) - log_ratio


def _counts(batch: Batch) -> Tensor:
    """Return the number of loss tokens of each sequence, [B], at least 1."""
    return batch.sum_by_sequence(batch["loss_mask"].to(batch["rollout_log_probs"].dtype)).clamp(min=1)
