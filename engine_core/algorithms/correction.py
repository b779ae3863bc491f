"""The gap between the policy that sampled and the policy that is trained: measured, then corrected.

The two are the same weights in two programs (or, off policy, two versions of the weights). With
``r = pi_old / pi_rollout`` at each sampled token: truncated importance sampling multiplies the loss
by ``min(r, cap)``, per token or per sequence (https://fengyao.notion.site/off-policy-rl).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch


def importance_weights(batch: Batch, old: Tensor, level: str, cap: float) -> Tensor | None:
    """Truncated importance weights, without gradient.

    Args:
        batch: ``rollout_log_probs`` [T], ``loss_mask`` [T].
        old: [T] log-probs of the trained policy before this step's updates.
        level: ``token``, ``sequence`` (product over the sequence) or ``off``.
        cap: upper bound.

    Returns:
        [T], or None for ``off``.
    """
    if level == "off":
        return None
    log_ratio = _log_ratio(batch, old)
    if level == "sequence":
        log_ratio = batch.to_tokens(batch.sum_by_sequence(log_ratio))
    return log_ratio.clamp(-20.0, 20.0).exp().clamp(max=cap)


def mismatch_metrics(batch: Batch, old: Tensor) -> dict[str, Tensor]:
    """The gap per token: ``kl`` (k3: r - log r - 1), ``mean_abs`` and ``max_abs`` of log r. Each [T]."""
    log_ratio = _log_ratio(batch, old)
    gap = log_ratio.abs()
    kl = torch.expm1(log_ratio.clamp(-20.0, 20.0)) - log_ratio
    return {"mismatch/kl": kl, "mismatch/mean_abs": gap, "max/mismatch/max_abs": gap}


def _log_ratio(batch: Batch, old: Tensor) -> Tensor:
    gap = old.detach() - batch["rollout_log_probs"]
    return torch.where(batch["loss_mask"], gap, torch.zeros_like(gap))
