"""Objectives for learning from preferences: pairs, single judgements, scores.

Each objective is ``f(outputs, batch) -> (sum, metrics)`` as in ``objectives``. Weights are columns over the mini-batch,
so sums over micro-batches are means over the mini-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.functional import logsigmoid

from engine_core.errors import PluginError
from engine_plugin_trainers.algorithms.preference import f_score
from engine_plugin_trainers.algorithms.preference_columns import (
    log_ratios,
    policy_weights,
    response_log_probs,
    sides,
)
from engine_plugin_trainers.options import PAIR_LOSSES

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.algorithms.objectives import Objective
    from engine_core.plugins import PluginSet
    from engine_core.types import Batch
    from engine_plugin_trainers.tables import PairLoss


def make_preference(plugins: PluginSet, *, loss: str, **parameters: Any) -> Objective:
    """Return ``preference`` with the pair loss of that name, resolved with the worker's plugins.

    Args:
        plugins: the worker's plugins.
        loss: name of a pair loss, from this distribution or another plugin.
        parameters: the other keyword arguments of ``preference``.
    """
    if loss in PAIR_LOSSES:
        return partial(preference, loss=loss, **parameters)
    found = plugins.function("pair_losses", loss)
    offered = dataclasses.replace(cast("PairLoss", plugins.spec("pair_losses", loss)), load=found)
    return partial(preference, loss=loss, offered=offered, **parameters)


def preference(
    outputs: Mapping[str, Tensor],
    batch: Batch,
    *,
    loss: str,
    beta: float,
    normalise: bool = False,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.5,
    sft_coef: float = 0.0,
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.5,
    discopop_tau: float = 0.05,
    wpo: bool = False,
    offered: PairLoss | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of a pair loss plus ``sft_coef`` times the mean -log p of the chosen tokens.

    If log-ratios are token means, f' is applied to the mean. TRL divides f' of the sum by the length; both are equal
    for the reverse KL.

    Args:
        outputs: ``log_probs`` [T], with gradient; ``sum_pi_squared`` [T] with ``wpo``.
        batch: whole pairs, with ``pair_share`` [B], ``weights`` [T], ``chosen`` [B] and, if the loss needs them,
            ``ref_log_probs`` [T] and ``tail_weights`` [T].
        loss: name of a pair loss; it receives the options that it reads.
        normalise: log-ratios are means over tokens.
        f_divergence: see ``preference.f_score``.
        f_alpha: parameter of the divergence ``alpha``.
        sft_coef: weight of the mean -log p of the chosen tokens.
        offered: declaration of the loss, if another plugin offers it.
        wpo: multiply each pair's loss (not its -log p) by ``preference_columns.policy_weights``.

    Returns:
        The sum, and metrics: rewards ``beta * log-ratio``, their accuracy and margin, and log-probs.
    """
    better, worse = sides(batch)
    ratio = log_ratios(outputs["log_probs"], batch, normalise)
    score = f_score(ratio, f_divergence, f_alpha)
    given = {
        "beta": beta,
        "label_smoothing": label_smoothing,
        "simpo_gamma": simpo_gamma,
        "discopop_tau": discopop_tau,
    }
    losses = _pair_losses(offered or PAIR_LOSSES[loss], loss, score, batch, given)
    share = batch["pair_share"][better]
    metrics = {}
    if wpo:
        likely = policy_weights(outputs["log_probs"], outputs["sum_pi_squared"], batch)
        losses, metrics["rewards/pair_weight"] = likely * losses, (share * likely).sum()
    total = (share * losses).sum()
    learned, weights = batch["weights"] > 0, batch["weights"]
    nll = -(weights[learned] * outputs["log_probs"][learned]).sum()
    if sft_coef:
        total = total + sft_coef * nll
    logps = response_log_probs(outputs["log_probs"].detach(), batch)
    metrics |= _of_pairs(beta * ratio.detach(), better, worse, share) | {
        "logps/chosen": (share * logps[better]).sum(),
        "logps/rejected": (share * logps[worse]).sum(),
        "actor/nll": nll.detach(),
    }
    return total, metrics


def _pair_losses(
    spec: PairLoss, name: str, scores: Tensor, batch: Batch, options: Mapping[str, float]
) -> Tensor:
    """Return losses [P] of pairs from scores [B].

    Raises:
        PluginError: the function returned something else than one number per pair.
    """
    better, worse = sides(batch)
    given = {key: options[key] for key in spec.keywords}
    losses = spec.resolve()(scores[better], scores[worse], **given)
    if not isinstance(losses, torch.Tensor) or losses.shape != better.shape:
        got = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise PluginError(
            f"dpo.loss = '{name}' must return [P] = [{len(better)}], one loss per pair; it returned {got}."
        )
    return losses


def kto(
    outputs: Mapping[str, Tensor],
    batch: Batch,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return KTO's loss, which compares each response with z, the KL to the reference.

    Formula: ``w+ (1 - σ(β(d - z)))`` for desirable, ``w- (1 - σ(β(z - d)))`` for undesirable responses, d the log-ratio
    Paper: https://arxiv.org/abs/2402.01306

    This is equation 8 of the paper; with z = 0 it is equation 7 of APO (https://arxiv.org/abs/2408.06266). z is a
    column (``mismatch_kl``).

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``ref_log_probs`` [T]; ``desirable`` [B] bool; ``kl`` [B], one value; ``share`` [B]
            (1 / B); ``kind_share`` [B] (1 / number of its kind, for metrics).
        beta: scale of log-ratios, over 0.
        desirable_weight: w+.
        undesirable_weight: w-.

    Returns:
        The sum, and metrics: means of rewards and log-probs over each kind, 0 for a kind that the mini-batch lacks, and
        the difference of the two rewards.
    """
    ratio, desirable = log_ratios(outputs["log_probs"], batch), batch["desirable"]
    gap = beta * (ratio - batch["kl"])
    losses = torch.where(desirable, desirable_weight * (-gap).sigmoid(), undesirable_weight * gap.sigmoid())
    rewards = beta * ratio.detach() * batch["kind_share"]
    logps = response_log_probs(outputs["log_probs"].detach(), batch) * batch["kind_share"]
    metrics = {}
    for name, kind in (("chosen", desirable), ("rejected", ~desirable)):
        metrics[f"rewards/{name}"] = torch.where(kind, rewards, 0.0).sum()
        metrics[f"logps/{name}"] = torch.where(kind, logps, 0.0).sum()
    metrics["rewards/margin"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return (batch["share"] * losses).sum(), metrics


def mismatch_kl(policy: Tensor, reference: Tensor, batch: Batch) -> float:
    """Return KTO's z: ``max(0, mean(log p - log p_ref))`` over responses to other prompts.

    Args:
        policy: [T] log-probs of the policy on ``batch``.
        reference: [T] log-probs of the reference on ``batch``.
        batch: a batch of ``preference_columns.mismatched``.
    """
    ratio = response_log_probs(policy, batch) - response_log_probs(reference, batch)
    return max(0.0, float(ratio.double().mean()))


def reward_model(
    outputs: Mapping[str, Tensor], batch: Batch, *, center_coef: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the Bradley-Terry loss of scores, with a margin and centering around 0.

    Formula: ``-log σ(r_c - r_r - margin) + center_coef (r_c + r_r)²``
    Paper: https://arxiv.org/abs/2312.09244 (centering)

    The first term equals ``log(1 + exp(r_r - r_c + margin))``, also known as logexp.

    Args:
        outputs: ``scores`` [T], with gradient; the score of a sequence is that of its last token.
        batch: whole pairs, with ``pair_share`` [B] and ``margin`` [B].
        center_coef: weight of the centering.
    """
    better, worse = sides(batch)
    scores = outputs["scores"][batch.offsets[1:] - 1]
    share = batch["pair_share"][better]
    chosen, rejected = scores[better], scores[worse]
    losses = -logsigmoid(chosen - rejected - batch["margin"][better])
    if center_coef:
        losses = losses + center_coef * (chosen + rejected) ** 2
    return (share * losses).sum(), _of_pairs(scores.detach(), better, worse, share)


def _of_pairs(rewards: Tensor, better: Tensor, worse: Tensor, share: Tensor) -> dict[str, Tensor]:
    """Return means over pairs; a tie counts against the accuracy."""
    chosen, rejected = rewards[better], rewards[worse]
    return {
        "rewards/chosen": (share * chosen).sum(),
        "rewards/rejected": (share * rejected).sum(),
        "rewards/accuracy": (share * (chosen > rejected)).sum(),
        "rewards/margin": (share * (chosen - rejected)).sum(),
    }
