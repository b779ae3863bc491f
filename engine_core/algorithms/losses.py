"""Losses: ``f(outputs, batch, **options) -> (loss per token [T], metrics)``.

A loss sees whole sequences and returns the loss of each token. ``objectives`` adds weights, sum, KL, entropy and
importance weights, in the same way for all losses. A metric is a [T] tensor, whose token mean is reported.

In the formulas p is the policy in training, r is ``p / p_old``, and sg stops the gradient. They hold for any
``old_log_probs``. If the policy has not changed since (the batch lacks that column), the ratio is exactly 1 and its
gradient is that of the log-prob. A ratio is computed from a log-ratio clamped to -20..20, so that one token cannot
overflow the batch.

``value`` is the loss of a critic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch

Outputs = Mapping[str, "Tensor"]
TokenLoss = tuple["Tensor", dict[str, "Tensor"]]


def ppo_clip(
    outputs: Outputs,
    batch: Batch,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = None,
    delta: float | None = None,
) -> TokenLoss:
    """Clipped surrogate: a token that has moved far enough in the direction of its advantage gets no gradient.

    Formula: ``max(-r A, -clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A)``; with `clip_ratio_c` at most ``-c A`` where A < 0; with `delta` the first r is at most delta
    Paper: https://arxiv.org/abs/1707.06347 (clip), https://arxiv.org/abs/2503.14476 (clip-higher), https://arxiv.org/abs/1912.09729 (dual clip), https://arxiv.org/abs/2505.07291 (delta)
    Differs: the dual clip is off unless set (verl: 3); `clip_ratio` is what the two widths are where they are not set (verl: setting it changes nothing)

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T]; ``old_log_probs`` [T] if the policy has changed since.
        clip_ratio: default of both widths.
        clip_ratio_low: lower width.
        clip_ratio_high: upper width.
        clip_ratio_c: dual clip, above 1 (https://arxiv.org/abs/1912.09729): upper bound ``-c A`` of the loss at a
            negative advantage. None is off.
        delta: two-sided clip (INTELLECT-2, https://arxiv.org/abs/2505.07291): upper bound of r in the unclipped
            term, which bounds the loss at a negative advantage. None is off.

    Returns:
        [T] loss, and the metrics ``ratio_mean``, ``clip_fraction`` and ``approx_kl`` (k3 of old to new).
    """
    log_ratio, ratio = log_ratio_and_ratio(outputs, batch)
    advantages = batch["advantages"]
    low = clip_ratio if clip_ratio_low is None else clip_ratio_low
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    plain = -(ratio if delta is None else ratio.clamp(max=delta)) * advantages
    clipped = -ratio.clamp(1 - low, 1 + high) * advantages
    loss = torch.maximum(plain, clipped)
    if clip_ratio_c is not None:
        bounded = torch.minimum(loss, -clip_ratio_c * advantages)
        loss = torch.where(advantages < 0, bounded, loss)
    return loss, {**ratio_metrics(log_ratio, ratio), "clip_fraction": (clipped > plain).float()}


def reinforce(outputs: Outputs, batch: Batch) -> TokenLoss:
    """REINFORCE, and GPG: no ratio and no clip; off policy only the correction weighs tokens.

    Formula: ``-A log p``
    Paper: https://arxiv.org/abs/2504.02546

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T].

    Returns:
        [T] loss, and the metrics ``ratio_mean`` and ``approx_kl``.
    """
    return -batch["advantages"] * outputs["log_probs"], ratio_metrics(*log_ratio_and_ratio(outputs, batch))


def old_log_probs(outputs: Outputs, batch: Batch) -> Tensor:
    """Return the log-probs [T] of the policy before the update; the current ones if it has not changed."""
    if "old_log_probs" in batch:
        return batch["old_log_probs"]
    return outputs["log_probs"].detach()


def log_ratio_and_ratio(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return ``log p - log p_old`` and its exponential within e^-20..e^20, both [T] with gradient."""
    log_ratio = outputs["log_probs"] - old_log_probs(outputs, batch)
    return log_ratio, log_ratio.clamp(-20.0, 20.0).exp()


def ratio_metrics(log_ratio: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    """Return ``ratio_mean`` [T] and ``approx_kl`` [T], the k3 estimate of the KL of the old policy to the new one."""
    ratio, log_ratio = ratio.detach(), log_ratio.detach()
    return {"ratio_mean": ratio, "approx_kl": ratio - 1 - log_ratio}


def value(outputs: Outputs, batch: Batch, *, value_clip: float | None = None) -> TokenLoss:
    """Squared error of the value; a value that has moved further than `value_clip` towards its target gets no gradient.

    Formula: ``max((V - G)^2, (V_old + clip(V - V_old, -e, e) - G)^2) / 2``
    Paper: https://arxiv.org/abs/1707.06347 (the authors' code)

    Args:
        outputs: ``values`` [T], with gradient.
        batch: ``returns`` [T] (G), ``values`` [T] (V_old, before the update).
        value_clip: e, above 0; None: no clip.

    Returns:
        [T] loss, and the metrics ``value_mean``, ``return_mean``, ``clip_fraction``.
    """
    values, returns = outputs["values"], batch["returns"]
    error = (values - returns) ** 2
    clipped = error
    if value_clip is not None:
        old = batch["values"]
        moved = values - old
        bounded = (old + moved.clamp(-value_clip, value_clip) - returns) ** 2
        clipped = torch.where(moved.abs() > value_clip, bounded, error)  # else they differ by rounding
    loss = 0.5 * torch.maximum(error, clipped)
    metrics = {
        "value_mean": values.detach(),
        "return_mean": returns,
        "clip_fraction": (clipped > error).to(loss.dtype),
    }
    return loss, metrics
