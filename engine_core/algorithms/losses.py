"""Policy losses: ``f(outputs, batch, **options) -> (loss per token [T], metrics)``.

A loss sees whole sequences and says what each token costs. Weighing, summing, KL, entropy and
importance weights are added once for all losses in ``objectives``; a metric is a [T] tensor, of
which the token mean is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch


def ppo_clip(
    outputs: Mapping[str, Tensor],
    batch: Batch,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate: ``max(-rho A, -clip(rho, 1 - low, 1 + high) A)``, ``rho = pi / pi_old``.

    PPO, https://arxiv.org/abs/1707.06347; ``high > low`` is DAPO's clip-higher,
    https://arxiv.org/abs/2503.14476. With ``clip_ratio_c`` (dual clip,
    https://arxiv.org/abs/1912.09729) a negative advantage costs at most ``-c A``.

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T]; ``old_log_probs`` [T] where the policy has moved since, else the
            ratio is exactly 1 and its gradient that of the log-prob.
        clip_ratio_low: lower width.
        clip_ratio_high: upper width.
        clip_ratio_c: dual clip bound, above 1; None is off.

    Returns:
        [T] loss, and the metrics ``ratio_mean``, ``clip_fraction`` and ``approx_kl`` (k3 of old to new).
    """
    log_ratio = outputs["log_probs"] - old_log_probs(outputs, batch)
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    advantages = batch["advantages"]
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantages
    loss = torch.maximum(plain, clipped)
    if clip_ratio_c is not None:
        bounded = torch.minimum(loss, -clip_ratio_c * advantages)
        loss = torch.where(advantages < 0, bounded, loss)
    detached = ratio.detach()
    metrics = {
        "ratio_mean": detached,
        "clip_fraction": (clipped > plain).float(),
        "approx_kl": detached - 1 - log_ratio.detach(),
    }
    return loss, metrics


def old_log_probs(outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """[T] log-probs of the policy that the update started from; the current ones where it has not moved."""
    if "old_log_probs" in batch:
        return batch["old_log_probs"]
    return outputs["log_probs"].detach()
