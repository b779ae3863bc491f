"""Clip-Cov and KL-Cov: losses with a special treatment of the few tokens that reduce entropy most.

https://arxiv.org/abs/2505.22617. Entropy falls with the covariance of log-prob and advantage, and few tokens carry most
of the covariance. The choice of these tokens is a statistic over the mini-batch. So it is a column: ``mark_*`` computes
it from the log-probs before the update, and the loss reads it. The authors' code ranks within a micro-batch, so its
result depends on how a batch is split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_core.algorithms.losses import log_ratio_and_ratio, ppo_clip, ratio_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.algorithms.losses import Outputs, TokenLoss
    from engine_core.types import Batch


def clip_cov(
    outputs: Outputs,
    batch: Batch,
    *,
    clip_ratio_low: float = 1.0,
    clip_ratio_high: float = 1.0,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> TokenLoss:
    """Return PPO's clipped loss with no gradient from a few tokens whose covariance is high.

    Formula: as `ppo_clip`, 0 at `clip_cov_ratio` of the tokens, drawn from those with ``clip_cov_lb < (A - mean A)(log p - mean log p) < clip_cov_ub`` that the clip leaves
    Paper: https://arxiv.org/abs/2505.22617
    Differs: chosen once over the mini-batch, before its update (the authors: within each micro-batch)

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T], ``covariance_chosen`` [T]; ``old_log_probs`` [T] where the policy has
            moved.
        clip_ratio_low: lower width of PPO's clip.
        clip_ratio_high: upper width.
        clip_cov_ratio: read by ``mark_clip_cov`` only.
        clip_cov_lb: read by ``mark_clip_cov`` only.
        clip_cov_ub: read by ``mark_clip_cov`` only.

    Returns:
        [T] loss, and the metrics of ``ppo_clip`` and ``covariance_share`` (tokens chosen).
    """
    loss, metrics = ppo_clip(outputs, batch, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    chosen = batch["covariance_chosen"]
    return torch.where(chosen, torch.zeros_like(loss), loss), {**metrics, "covariance_share": chosen.float()}


def kl_cov(
    outputs: Outputs, batch: Batch, *, ppo_kl_coef: float = 1.0, kl_cov_ratio: float = 2e-4
) -> TokenLoss:
    """Return the unclipped loss with a penalty on the few tokens whose covariance is largest.

    Formula: ``-r A``, and ``+ ppo_kl_coef |log r|`` at the `kl_cov_ratio` of the tokens with the largest ``(A - mean A)(log p - mean log p)``
    Paper: https://arxiv.org/abs/2505.22617
    Differs: chosen once over the mini-batch, before its update

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T], ``covariance_chosen`` [T]; ``old_log_probs`` [T] where the policy has
            moved.
        ppo_kl_coef: weight of the penalty.
        kl_cov_ratio: read by ``mark_kl_cov`` only.

    Returns:
        [T] loss, and the metrics ``ratio_mean``, ``approx_kl`` and ``covariance_share``.
    """
    log_ratio, ratio = log_ratio_and_ratio(outputs, batch)
    chosen = batch["covariance_chosen"].to(ratio.dtype)
    loss = -ratio * batch["advantages"] + ppo_kl_coef * chosen * log_ratio.abs()
    return loss, {**ratio_metrics(log_ratio, ratio), "covariance_share": chosen}


def mark_clip_cov(
    batch: Batch,
    seed: int,
    *,
    clip_ratio_low: float = 1.0,
    clip_ratio_high: float = 1.0,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> dict[str, Tensor]:
    """Choose at random ``ratio * N`` (at least 1) of the tokens with ``lb < covariance < ub``.

    Args:
        batch: the whole mini-batch: ``advantages`` [T], ``current_log_probs`` [T], ``loss_mask`` [T], and
            ``old_log_probs`` [T] if the policy has moved. Tokens that PPO's clip already stops are not chosen.
        seed: seed of the choice.
        clip_ratio_low: lower width of PPO's clip.
        clip_ratio_high: upper width.
        clip_cov_ratio: share of the N loss tokens.
        clip_cov_lb: lower bound.
        clip_cov_ub: upper bound.

    Returns:
        ``covariance_chosen`` [T] bool.
    """
    covariance = covariances(batch)
    outputs = {"log_probs": batch["current_log_probs"]}
    _, metrics = ppo_clip(outputs, batch, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    fits = batch["loss_mask"] & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    candidates = (fits & (metrics["clip_fraction"] == 0)).nonzero().flatten()
    wanted = max(int(clip_cov_ratio * int(batch["loss_mask"].sum())), 1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return {"covariance_chosen": _marked(batch, candidates[order[:wanted]])}


def mark_kl_cov(
    batch: Batch, seed: int, *, ppo_kl_coef: float = 1.0, kl_cov_ratio: float = 2e-4
) -> dict[str, Tensor]:
    """Choose the ``ratio * N`` (at least 1) tokens with the largest covariance.

    Args:
        batch: the whole mini-batch: ``advantages`` [T], ``current_log_probs`` [T], ``loss_mask`` [T].
        seed: not used, because nothing is random here.
        ppo_kl_coef: not used; the loss reads it.
        kl_cov_ratio: share of the N loss tokens.

    Returns:
        ``covariance_chosen`` [T] bool.
    """
    places = batch["loss_mask"].nonzero().flatten()
    wanted = min(max(int(kl_cov_ratio * len(places)), 1), len(places))
    return {"covariance_chosen": _marked(batch, places[covariances(batch)[places].topk(wanted).indices])}


def covariances(batch: Batch) -> Tensor:
    """Return ``(A - mean A)(log pi - mean log pi)`` [T], with means over the batch's loss tokens; 0 elsewhere."""
    mask = batch["loss_mask"]
    count = mask.sum().clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        """Return values [T] minus their mean over the loss tokens."""
        held = torch.where(mask, values, torch.zeros_like(values))
        return held - held.sum() / count

    product = centred(batch["advantages"]) * centred(batch["current_log_probs"])
    return torch.where(mask, product, torch.zeros_like(product))


def _marked(batch: Batch, places: Tensor) -> Tensor:
    """Return [T] bool, True at ``places``."""
    chosen = torch.zeros(batch.num_tokens, dtype=torch.bool)
    chosen[places] = True
    return chosen
