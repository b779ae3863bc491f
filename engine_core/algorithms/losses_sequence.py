"""Policy losses whose ratio is that of a whole sequence: GSPO, LUSPO, GMPO, VESPO.

Each loss is written per token, so that any aggregation and any split of the mini-batch into whole
sequences gives the same sum. With the aggregation that a loss names in its spec, the sum is the
paper's objective if all tokens of a sequence have the same advantage, as in the papers.
Means and products are over loss tokens; a sequence without loss tokens has the ratio 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_core.algorithms.losses import by_sign, log_ratio_and_ratio, ratio_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.algorithms.losses import Outputs, TokenLoss
    from engine_core.types import Batch


def gspo(
    outputs: Outputs, batch: Batch, *, clip_ratio_low: float = 3e-4, clip_ratio_high: float = 4e-4
) -> TokenLoss:
    """PPO's clip on the ratio of the whole sequence.

    Formula: ``max(-s A, -clip(s, 1 - clip_ratio_low, 1 + clip_ratio_high) A)``, ``s = exp(mean_t log r_t)``
    Paper: https://arxiv.org/abs/2507.18071
    Differs: written per token (equation 17), which is the sequence form where a sequence has one advantage

    The value at each token is s, and its gradient goes only through that token's log-prob; the mean over tokens
    is the gradient of s. The defaults are the paper's widths, far below those of a token's ratio.

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T], ``loss_mask`` [T]; ``old_log_probs`` [T] where the policy has moved.
        clip_ratio_low: lower width.
        clip_ratio_high: upper width.

    Returns:
        [T] loss, and the metrics ``ratio_mean`` (of s), ``clip_fraction`` and ``approx_kl`` (of tokens).
    """
    log_ratio, ratio = log_ratio_and_ratio(outputs, batch)
    sequence = batch.to_tokens(mean_by_sequence(batch, log_ratio.detach())).clamp(-20.0, 20.0).exp()
    log_probs = outputs["log_probs"]
    surrogate = sequence * (log_probs - log_probs.detach()).exp()  # value s, gradient s d log pi
    advantages = batch["advantages"]
    plain = -surrogate * advantages
    clipped = -surrogate.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantages
    metrics = ratio_metrics(log_ratio, ratio) | {"ratio_mean": sequence}
    return torch.maximum(plain, clipped), {**metrics, "clip_fraction": (clipped > plain).float()}


def luspo(
    outputs: Outputs, batch: Batch, *, clip_ratio_low: float = 3e-4, clip_ratio_high: float = 4e-4
) -> TokenLoss:
    """GSPO with sequences weighed by their length.

    Formula: as `gspo`, summed over the tokens of a rollout, then the mean over rollouts
    Paper: https://arxiv.org/abs/2602.05261

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T], ``loss_mask`` [T]; ``old_log_probs`` [T] where the policy has moved.
        clip_ratio_low: lower width.
        clip_ratio_high: upper width.

    Returns:
        [T] loss, and the metrics of ``gspo``.
    """
    return gspo(outputs, batch, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)


def gmpo(
    outputs: Outputs, batch: Batch, *, clip_ratio_low: float = 0.4, clip_ratio_high: float = 0.4
) -> TokenLoss:
    """The geometric mean of clipped ratios.

    Formula: ``-A exp(mean_t x_t)``, ``x = sign(A) min(sign(A) log r, sign(A) clip(log r, -clip_ratio_low, clip_ratio_high))``
    Paper: https://arxiv.org/abs/2507.20673
    Differs: the widths are of log r, as in the paper

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T], ``loss_mask`` [T]; ``old_log_probs`` [T] where the policy has moved.
        clip_ratio_low: lower width, of log r.
        clip_ratio_high: upper width, of log r.

    Returns:
        [T] loss, and the metrics ``ratio_mean`` (of the geometric mean), ``clip_fraction`` (of tokens)
        and ``approx_kl``.
    """
    log_ratio, ratio = log_ratio_and_ratio(outputs, batch)
    advantages = batch["advantages"]
    sign = advantages.sign()
    held = log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    x = sign * torch.minimum(sign * log_ratio, sign * held)
    mean = batch.to_tokens(mean_by_sequence(batch, x).clamp(-20.0, 20.0).exp())
    clipped = (sign * held < sign * log_ratio).float()
    metrics = ratio_metrics(log_ratio, ratio) | {"ratio_mean": mean.detach(), "clip_fraction": clipped}
    return -advantages * mean, metrics


def vespo(
    outputs: Outputs,
    batch: Batch,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> TokenLoss:
    """A soft window over the importance weight of the sequence.

    Formula: ``-sg(w^k exp(lambda (1 - w))) A log p``, ``w = prod_t r_t``, k and lambda by the sign of A
    Paper: https://arxiv.org/abs/2602.10693

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T], ``loss_mask`` [T]; ``old_log_probs`` [T] where the policy has moved.
        k_pos: power of w where A > 0.
        lambda_pos: decay where A > 0.
        k_neg: power of w elsewhere.
        lambda_neg: decay elsewhere.

    Returns:
        [T] loss, and the metrics ``ratio_mean`` (of tokens), ``weight_mean`` (of the factor in sg) and ``approx_kl``.
    """
    log_ratio, ratio = log_ratio_and_ratio(outputs, batch)
    advantages = batch["advantages"]
    log_w = batch.to_tokens(sum_by_sequence(batch, log_ratio.detach())).clamp(-20.0, 20.0)
    k, decay = by_sign(advantages, k_pos, k_neg), by_sign(advantages, lambda_pos, lambda_neg)
    phi = (k * log_w + decay * (1 - log_w.exp())).exp()
    metrics = {**ratio_metrics(log_ratio, ratio), "weight_mean": phi}
    return -phi * advantages * outputs["log_probs"], metrics


def sum_by_sequence(batch: Batch, values: Tensor) -> Tensor:
    """Return the sum of values [T] over each sequence's loss tokens, [B]."""
    return batch.sum_by_sequence(torch.where(batch["loss_mask"], values, torch.zeros_like(values)))


def mean_by_sequence(batch: Batch, values: Tensor) -> Tensor:
    """Return the mean of values [T] over each sequence's loss tokens, [B]; 0 if a sequence has none."""
    count = batch.sum_by_sequence(batch["loss_mask"].to(values.dtype))
    return sum_by_sequence(batch, values) / count.clamp(min=1)
