"""Policy losses: ``f(outputs, batch, **options) -> (loss per token [T], metrics)``.

A loss sees whole sequences and says what each token costs. Weighing, summing, KL, entropy and
importance weights are added once for all losses in ``objectives``; a metric is a [T] tensor, of
which the token mean is reported.

Here are the losses of one token; those whose ratio is a sequence's are in ``losses_sequence``, those
that look at the mini-batch first in ``losses_covariance``. Each holds for any ``old_log_probs``; where
the policy has not moved since (no such column) the ratio is exactly 1 and its gradient that of the
log-prob. All log-ratios are held within 20, so that one token cannot overflow the batch.
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
    """Clipped surrogate: ``max(-rho A, -clip(rho, 1 - low, 1 + high) A)``, ``rho = pi / pi_old``.

    PPO, https://arxiv.org/abs/1707.06347; ``high > low`` is DAPO's clip-higher,
    https://arxiv.org/abs/2503.14476.

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T]; ``old_log_probs`` [T] where the policy has moved since.
        clip_ratio: both widths, where they are not set.
        clip_ratio_low: lower width.
        clip_ratio_high: upper width.
        clip_ratio_c: dual clip, above 1 (https://arxiv.org/abs/1912.09729): a negative advantage
            costs at most ``-c A``. None is off.
        delta: two-sided clip (INTELLECT-2, https://arxiv.org/abs/2505.07291): rho of the unclipped
            term is at most this, which bounds what a negative advantage can cost. None is off.

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
    """REINFORCE: ``-A log pi``; also the loss of GPG (https://arxiv.org/abs/2504.02546).

    No ratio: off policy it is the correction that weighs (``[algorithm.correction]``, with ``bypass``
    by the ratio to the sampler).

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T].

    Returns:
        [T] loss, and the metrics ``ratio_mean`` and ``approx_kl``.
    """
    return -batch["advantages"] * outputs["log_probs"], ratio_metrics(*log_ratio_and_ratio(outputs, batch))


def cispo(
    outputs: Outputs, batch: Batch, *, clip_ratio_low: float = 1.0, clip_ratio_high: float = 4.0
) -> TokenLoss:
    """Clipped importance weight: ``-sg(clip(rho, 1 - low, 1 + high)) A log pi``.

    MiniMax-M1, https://arxiv.org/abs/2506.13585, section 3.1: the weight is bounded and every token
    keeps its gradient. The defaults are no lower bound and 5. (TRL's ``epsilon_high`` is the bound
    itself, ours the width above 1, as in every other loss.)

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T]; ``old_log_probs`` [T] where the policy has moved since.
        clip_ratio_low: lower width; 1 is no bound.
        clip_ratio_high: upper width.

    Returns:
        [T] loss, and the metrics ``ratio_mean``, ``clip_fraction`` and ``approx_kl``.
    """
    log_ratio, ratio = log_ratio_and_ratio(outputs, batch)
    weight = ratio.detach().clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    metrics = {**ratio_metrics(log_ratio, ratio), "clip_fraction": (weight != ratio).float()}
    return -weight * batch["advantages"] * outputs["log_probs"], metrics


def sapo(outputs: Outputs, batch: Batch, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """Soft gate in place of the clip: ``-(4 / tau) sigmoid(tau (rho - 1)) A``, tau by the sign of A.

    SAPO, https://arxiv.org/abs/2511.20347. At ``rho = 1`` its gradient is that of ``-rho A``, and it
    fades on both sides; the mean over a rollout's tokens, then over rollouts, is the paper's.

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T]; ``old_log_probs`` [T] where the policy has moved since.
        tau_pos: temperature where A > 0; higher fades faster.
        tau_neg: temperature elsewhere.

    Returns:
        [T] loss, and the metrics ``ratio_mean`` and ``approx_kl``.
    """
    log_ratio, ratio = log_ratio_and_ratio(outputs, batch)
    advantages = batch["advantages"]
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages, ratio_metrics(log_ratio, ratio)


def dppo_tv(
    outputs: Outputs,
    batch: Batch,
    *,
    threshold_low: float = 0.2,
    threshold_high: float = 0.2,
    cap: float = 20.0,
) -> TokenLoss:
    """Trust region by probability difference: ``-A sg(min(rho, cap)) log pi`` on kept tokens.

    DPPO, https://arxiv.org/abs/2602.04879. A token is dropped where the update would push it further
    away and it is too far already: ``A > 0`` and ``pi - pi_old > high``, or ``A <= 0`` and
    ``pi_old - pi > low``. (The names are our own: verl reads its clip widths as these thresholds.)

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T]; ``old_log_probs`` [T] where the policy has moved since.
        threshold_low: bound below.
        threshold_high: bound above.
        cap: upper bound of rho.

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
    """``dppo_tv`` with the KL of the two-way choice "this token or another" as distance.

    DPPO, https://arxiv.org/abs/2602.04879: ``p log(p / q) + (1 - p) log((1 - p) / (1 - q))`` with
    ``p = pi_old`` and ``q = pi``, and only where the token has moved the way that A pushes it.

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``advantages`` [T]; ``old_log_probs`` [T] where the policy has moved since.
        threshold_low: bound where the token became less likely.
        threshold_high: bound where it became more likely.
        cap: upper bound of rho.

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
    """Direct reward optimization: ``-(A log pi - beta / 2 (log rho)^2)``: a square in place of the clip.

    https://arxiv.org/abs/2405.19107, with the policy before the update as the reference, and the
    advantage for the reward less the value.

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


def old_log_probs(outputs: Outputs, batch: Batch) -> Tensor:
    """[T] log-probs of the policy that the update started from; the current ones where it has not moved."""
    if "old_log_probs" in batch:
        return batch["old_log_probs"]
    return outputs["log_probs"].detach()


def log_ratio_and_ratio(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """``log pi - log pi_old`` and its exponential within e^20, both [T] with gradient."""
    log_ratio = outputs["log_probs"] - old_log_probs(outputs, batch)
    return log_ratio, log_ratio.clamp(-20.0, 20.0).exp()


def ratio_metrics(log_ratio: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    """``ratio_mean``, and ``approx_kl``: k3 of the old policy to the new one."""
    ratio, log_ratio = ratio.detach(), log_ratio.detach()
    return {"ratio_mean": ratio, "approx_kl": ratio - 1 - log_ratio}


def _within_region(outputs: Outputs, batch: Batch, far: Tensor, cap: float) -> TokenLoss:
    log_ratio, ratio = log_ratio_and_ratio(outputs, batch)
    loss = -batch["advantages"] * ratio.detach().clamp(max=cap) * outputs["log_probs"]
    metrics = {**ratio_metrics(log_ratio, ratio), "clip_fraction": far.float()}
    return torch.where(far, torch.zeros_like(loss), loss), metrics


def _log_of_rest(log_probs: Tensor) -> Tensor:
    """``log(1 - p)``, finite for a certain token."""
    return (-torch.expm1(log_probs)).clamp(min=1e-12).log()
