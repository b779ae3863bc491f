"""Policy losses besides the core's: with a ratio per token (CISPO, SAPO, DPPO, DRO) or sequence (GSPO, LUSPO, GMPO, VESPO).

``engine_core.algorithms.losses`` says what a loss is, and what the letters in the formulas mean.

Each loss is written per token, so that any aggregation and any split of the mini-batch into whole
sequences gives the same sum. With the aggregation that a loss names in its spec, the sum is the
paper's objective if all tokens of a sequence have the same advantage, as in the papers.
Means and products are over loss tokens; a sequence without loss tokens has the ratio 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_core.algorithms.losses import log_ratio_and_ratio, old_log_probs, ratio_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.algorithms.losses import Outputs, TokenLoss
    from engine_core.types import Batch


def cispo(
    outputs: Outputs, batch: Batch, *, clip_ratio_low: float = 1.0, clip_ratio_high: float = 4.0
) -> TokenLoss:
    """The weight of a token is bounded, and every token keeps its gradient.

    Formula: ``-sg(clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)) A log p``
    Paper: https://arxiv.org/abs/2506.13585
    Differs: the bounds are widths around 1, as in every other loss (TRL: its upper bound is the weight itself); by default none below and 5 above

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T]; ``old_log_probs`` [T] where the policy has moved since.
        clip_ratio_low: lower width; 1 means no bound.
        clip_ratio_high: upper width.

    Returns:
        [T] loss, and the metrics ``ratio_mean``, ``clip_fraction`` and ``approx_kl``.
    """
    log_ratio, ratio = log_ratio_and_ratio(outputs, batch)
    weight = ratio.detach().clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    metrics = {**ratio_metrics(log_ratio, ratio), "clip_fraction": (weight != ratio).float()}
    return -weight * batch["advantages"] * outputs["log_probs"], metrics


def sapo(outputs: Outputs, batch: Batch, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """A soft gate instead of the clip: the gradient decays on both sides of r = 1.

    Formula: ``-(4 / tau) sigmoid(tau (r - 1)) A``, tau = `tau_pos` where A > 0, else `tau_neg`
    Paper: https://arxiv.org/abs/2511.20347

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T]; ``old_log_probs`` [T] where the policy has moved since.
        tau_pos: temperature where A > 0; a higher one decays faster.
        tau_neg: temperature elsewhere.

    Returns:
        [T] loss, and the metrics ``ratio_mean`` and ``approx_kl``.
    """
    log_ratio, ratio = log_ratio_and_ratio(outputs, batch)
    advantages = batch["advantages"]
    tau = by_sign(advantages, tau_pos, tau_neg)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages, ratio_metrics(log_ratio, ratio)


def dppo_tv(
    outputs: Outputs,
    batch: Batch,
    *,
    threshold_low: float = 0.2,
    threshold_high: float = 0.2,
    cap: float = 20.0,
) -> TokenLoss:
    """Trust region by probability: a token that has moved too far in the direction of its advantage gets no gradient.

    Formula: ``-A sg(min(r, cap)) log p``, and 0 where A > 0 and ``p - p_old > threshold_high``, or A <= 0 and ``p_old - p > threshold_low``
    Paper: https://arxiv.org/abs/2602.04879
    Differs: thresholds and cap are separate options (verl reads its clip widths and its dual clip as these)

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T]; ``old_log_probs`` [T] where the policy has moved since.
        threshold_low: largest decrease of the probability.
        threshold_high: largest increase of the probability.
        cap: upper bound of r.

    Returns:
        [T] loss, and the metrics ``ratio_mean``, ``clip_fraction`` (dropped) and ``approx_kl``.
    """
    new, old = outputs["log_probs"].detach(), old_log_probs(outputs, batch)
    moved = new.exp() - old.exp()
    far = torch.where(batch["advantages"] > 0, moved > threshold_high, -moved > threshold_low)
    return _within_region(outputs, batch, far, cap)


def dppo_kl(
    outputs: Outputs,
    batch: Batch,
    *,
    threshold_low: float = 0.05,
    threshold_high: float = 0.05,
    cap: float = 20.0,
) -> TokenLoss:
    """``dppo_tv`` with the KL of the binary choice "this token or another" as distance.

    Formula: as `dppo_tv`, with ``p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))`` over the threshold, where the token has moved the way that A pushes it
    Paper: https://arxiv.org/abs/2602.04879

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T]; ``old_log_probs`` [T] where the policy has moved since.
        threshold_low: bound if the token became less likely.
        threshold_high: bound if it became more likely.
        cap: upper bound of r.

    Returns:
        [T] loss, and the metrics ``ratio_mean``, ``clip_fraction`` (dropped) and ``approx_kl``.
    """
    new, old = outputs["log_probs"].detach(), old_log_probs(outputs, batch)
    other_new, other_old = _log_of_rest(new), _log_of_rest(old)
    divergence = old.exp() * (old - new) + other_old.exp() * (other_old - other_new)
    up = (new > old) & (divergence > threshold_high)
    down = (new < old) & (divergence > threshold_low)
    return _within_region(outputs, batch, torch.where(batch["advantages"] > 0, up, down), cap)


def dro(outputs: Outputs, batch: Batch, *, beta: float = 0.1) -> TokenLoss:
    """A squared log-ratio instead of the clip.

    Formula: ``-(A log p - beta / 2 (log r)^2)``
    Paper: https://arxiv.org/abs/2405.19107
    Differs: the reference is the policy before the update, and the advantage stands for reward less value

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T]; ``old_log_probs`` [T] where the policy has moved since.
        beta: weight of the square.

    Returns:
        [T] loss, and the metrics ``ratio_mean`` and ``approx_kl``.
    """
    log_ratio, ratio = log_ratio_and_ratio(outputs, batch)
    loss = -batch["advantages"] * outputs["log_probs"] + 0.5 * beta * log_ratio * log_ratio
    return loss, ratio_metrics(log_ratio, ratio)


def by_sign(advantages: Tensor, positive: float, other: float) -> Tensor:
    """Return a tensor [T]: ``positive`` where the advantage is positive, ``other`` elsewhere."""
    return torch.where(
        advantages > 0, torch.full_like(advantages, positive), torch.full_like(advantages, other)
    )


def _within_region(outputs: Outputs, batch: Batch, far: Tensor, cap: float) -> TokenLoss:
    log_ratio, ratio = log_ratio_and_ratio(outputs, batch)
    loss = -batch["advantages"] * ratio.detach().clamp(max=cap) * outputs["log_probs"]
    metrics = {**ratio_metrics(log_ratio, ratio), "clip_fraction": far.float()}
    return torch.where(far, torch.zeros_like(loss), loss), metrics


def _log_of_rest(log_probs: Tensor) -> Tensor:
    """Return ``log(1 - p)``, finite also for p = 1."""
    return (-torch.expm1(log_probs)).clamp(min=1e-12).log()


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
