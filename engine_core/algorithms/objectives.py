"""What a train engine differentiates: losses by name, resolved in the worker.

An objective is ``f(outputs, batch) -> (sum, metrics)``: the sum of ``weights`` times token loss over
the sequences it sees, and metrics that are summed over micro-batches (``max/`` ones maximised).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine_core.algorithms.correction import importance_weights, mismatch_metrics
from engine_core.algorithms.kl import kl_estimate
from engine_core.algorithms.losses import old_log_probs

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.plugins import PluginSet
    from engine_core.types import Batch, LossCall

Objective = Callable[[Mapping[str, "Tensor"], "Batch"], "tuple[Tensor, dict[str, Tensor]]"]


def resolve_loss(call: LossCall, plugins: PluginSet) -> Objective:
    """The objective behind a name.

    Args:
        call: ``policy`` (a policy loss of the table, with KL, entropy and correction) or ``nll``.
        plugins: the worker's own, which know the policy losses.
    """
    if call.name == "nll":
        return nll
    if call.name == "policy":
        parameters = dict(call.parameters)
        loss = plugins.resolve("losses", parameters.pop("loss"))
        token_loss = partial(loss, **parameters.pop("loss_options"))
        return partial(policy, token_loss=token_loss, **parameters)
    raise ValueError(f"Unknown objective '{call.name}'. Known: nll, policy.")


def policy(
    outputs: Mapping[str, Tensor],
    batch: Batch,
    *,
    token_loss: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    correction_level: str = "off",
    correction_cap: float = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``sum_t w_t (c_t loss_t + kl_coef kl_t - entropy_coef H_t)``.

    ``c_t`` is the truncated importance weight between sampler and trainer, multiplied after the
    clip and without gradient.

    Args:
        outputs: ``log_probs`` [T]; ``entropy`` [T] where it is weighed or watched.
        batch: ``weights``, ``token_share``, ``loss_mask``, ``rollout_log_probs``, and what the loss
            needs; ``ref_log_probs`` [T] for a KL.
        token_loss: the policy loss with its options bound.
        kl_coef: weight of the KL to the reference; 0 where it is in the reward.
        kl_estimator: k1, k2, k3.
        entropy_coef: weight of the bonus.
        correction_level: off, token, sequence.
        correction_cap: bound of the importance weights.
    """
    weights, share = batch["weights"], batch["token_share"]
    old = old_log_probs(outputs, batch)
    losses, watched = token_loss(outputs, batch)
    watched = {f"actor/{name}": value for name, value in watched.items()}
    watched |= mismatch_metrics(batch, old)
    correction = importance_weights(batch, old, correction_level, correction_cap)
    if correction is not None:
        losses = correction * losses
        watched["correction/weight_mean"] = correction
        watched["correction/capped_share"] = (correction >= correction_cap).float()
    total = _weighted_sum(weights, losses)
    if "ref_log_probs" in batch:
        kl = kl_estimate(outputs["log_probs"], batch["ref_log_probs"], kl_estimator)
        watched["actor/kl"] = kl.detach()
        if kl_coef:
            total = total + kl_coef * _weighted_sum(weights, kl)
    if "entropy" in outputs:
        watched["actor/entropy"] = outputs["entropy"].detach()
        if entropy_coef:
            total = total - entropy_coef * _weighted_sum(weights, outputs["entropy"])
    return total, _summed(watched, share)


def nll(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood ``-sum_t w_t log p_t``: SFT."""
    losses = -outputs["log_probs"]
    return _weighted_sum(batch["weights"], losses), _summed(
        {"actor/nll": losses.detach()}, batch["token_share"]
    )


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Sum of weight times value; a token of weight 0 adds 0 even where its value is not finite."""
    return (weights * torch.where(weights > 0, values, torch.zeros_like(values))).sum()


def _summed(watched: Mapping[str, Tensor], share: Tensor) -> dict[str, Tensor]:
    """Token means as sums over this micro-batch, maxima over its loss tokens."""
    summed = {}
    for name, value in watched.items():
        held = torch.where(share > 0, value.detach(), torch.zeros_like(value))
        summed[name] = held.max() if name.startswith("max/") else (share * held).sum()
    return summed
