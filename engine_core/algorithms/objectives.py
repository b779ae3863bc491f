"""Objectives, which a train engine differentiates: losses by name, resolved in the worker.

An objective is ``f(outputs, batch) -> (sum, metrics)``: the sum of ``weights`` times token loss over
the sequences of the batch, and metrics that are reduced as their names declare (``engine_core.metrics``).

Aggregation reduces token losses to one number that does not depend on the split into micro-batches and ranks.

The weights are computed once over the global mini-batch and sent as a column; a loss is then the
plain sum of weight times token loss. With m the loss mask, T its sum, B the number of sequences that
have a loss token and L_i the number of loss tokens of sequence i, the weight of a token is

======================= ============= =================================================================
mode                    formula       paper
======================= ============= =================================================================
token-mean              ``m / T``     DAPO, arXiv:2503.14476
token-sum               ``m``
seq-mean-token-sum      ``m / B``
seq-mean-token-mean     ``m/(L_i B)`` GRPO, arXiv:2402.03300
seq-mean-token-sum-norm ``m / (L B)`` Dr.GRPO, arXiv:2503.20783
======================= ============= =================================================================

Differs (seq-mean-token-sum-norm): L is a constant (verl by default divides by the padded length, which changes with padding)
Differs (token-mean): T is of the whole mini-batch over all ranks, never of a micro-batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine_core.algorithms import correction as gap
from engine_core.algorithms.correction import Correction
from engine_core.algorithms.losses import old_log_probs
from engine_core.algorithms.losses import value as value_loss
from engine_core.algorithms.regularizers import kl_estimate
from engine_core.errors import PluginError
from engine_core.metrics import LARGEST, over_tokens, with_prefix

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.types import Batch, LossCall


def with_weights(batch: Batch, mode: str, length_norm: int = 1, unit: float = 0.0) -> Batch:
    """Add each token's share of the aggregated loss; the table of this module has the formulas.

    Args:
        batch: the whole mini-batch of all ranks, or a part of it with ``unit``.
        mode: one of the five names.
        length_norm: L of seq-mean-token-sum-norm, in tokens.
        unit: if above 0, it replaces T and B, which are not known yet (of token-sum, it divides the weights): the sum over
            all parts is then multiplied by ``unit / normalizer(mode, T, B)``, and metrics, whose ``token_share`` is the
            mask, by ``1 / T``.

    Returns:
        The batch with ``weights`` [T] and ``token_share`` [T] (``m / T``, for metrics), 0 outside the loss mask.

    Raises:
        ValueError: ``mode`` is unknown.
    """
    mask = batch["loss_mask"].to(torch.float32, copy=True)
    per_sequence = batch.sum_by_sequence(mask)
    num_tokens = mask.sum().clamp(min=1)
    num_sequences = (per_sequence > 0).sum().clamp(min=1)
    if unit:
        each = torch.tensor(unit)
        divided = "token-mean" if mode == "token-sum" else mode  # every sum is multiplied by the unit later
        weights = mask * _weight(divided, batch, per_sequence, each, each, length_norm)
        return batch.with_columns(tokens={"weights": weights, "token_share": mask})
    weights = mask * _weight(mode, batch, per_sequence, num_tokens, num_sequences, length_norm)
    # in place: allocating one more column takes longer than the division
    return batch.with_columns(tokens={"weights": weights, "token_share": mask.div_(num_tokens)})


def normalizer(mode: str, num_tokens: float, num_sequences: float) -> float:
    """Return what an aggregation divides by that depends on the whole mini-batch: T, B or 1.

    Args:
        mode: one of the five names.
        num_tokens: T.
        num_sequences: B.
    """
    return {"token-mean": num_tokens, "token-sum": 1.0}.get(mode, num_sequences)


def _weight(
    mode: str, batch: Batch, per_sequence: Tensor, num_tokens: Tensor, num_sequences: Tensor, length_norm: int
) -> Tensor:
    if mode == "token-mean":
        return 1 / num_tokens
    if mode == "token-sum":
        return torch.ones(())
    if mode == "seq-mean-token-sum":
        return 1 / num_sequences
    if mode == "seq-mean-token-mean":
        return batch.to_tokens(1 / (per_sequence.clamp(min=1) * num_sequences))
    if mode == "seq-mean-token-sum-norm":
        return 1 / (length_norm * num_sequences)
    raise ValueError(f"Unknown loss aggregation '{mode}'.")


Objective = Callable[[Mapping[str, "Tensor"], "Batch"], "tuple[Tensor, dict[str, Tensor]]"]


def resolve_loss(call: LossCall, plugins: PluginSet) -> Objective:
    """Return the objective behind a name of the table ``engine_objectives``, with its parameters bound.

    If its loss is not finite, its gradient is NaN.

    Args:
        call: name and parameters: ``policy`` (a policy loss of the run, with KL, entropy and correction), ``value`` (a
            critic's loss), ``nll``, or an objective of a plugin.
        plugins: plugins of the worker.

    Raises:
        PluginError: no installed plugin offers the objective, or the plugin is broken.
    """
    found = plugins.require("objectives", call.name)
    spec: Any = plugins.spec("objectives", call.name)
    guarded = partial(plugins.guarded, "objectives", call.name)  # adds the plugin's name to errors
    objective = guarded(
        guarded(found)(plugins, **call.parameters) if spec.factory else partial(found, **call.parameters)
    )

    def checked(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Make the gradient of a loss of outputs [T] NaN if the loss is not finite: the optimizer step is then skipped."""
        total, metrics = objective(outputs, batch)
        return total * (1 + 0 * total.detach()), metrics

    return checked


def make_policy(
    plugins: PluginSet,
    *,
    loss: str,
    loss_options: Mapping[str, Any] | None = None,
    correction: Mapping[str, Any] | None = None,
    **parameters: Any,
) -> Objective:
    """Return ``policy`` with the loss and the correction that plain values name.

    Args:
        plugins: plugins of the worker, which offer the policy loss.
        loss: name of the policy loss.
        loss_options: its option table; None: the defaults of the function.
        correction: fields of ``Correction``.
        parameters: the other keyword arguments of ``policy``.
    """
    plugins.require("losses", loss)  # a trainer may name one that the run file does not
    found = partial(plugins.function("losses", loss), **loss_options or {})
    spec: Any = plugins.spec("losses", loss)
    declared = {"log_probs", *spec.outputs}

    def token_loss(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses [T] and the metrics of the loss after a check.

        The loss gets only the outputs that it declares: metrics read the others, which have no gradient.
        """
        made = found({name: value for name, value in outputs.items() if name in declared}, batch)
        check_token_loss(loss, made, outputs["log_probs"])
        return made

    return partial(policy, token_loss=token_loss, correction=Correction(**correction or {}), **parameters)


TAKEN = ("loss", "grad_norm", "lr", "skipped_steps", "micro_batches")
"""Metrics of a trained role, which no metric of a loss may replace."""


def check_token_loss(name: str, made: Any, log_probs: Tensor) -> None:
    """Refuse a result that is not the loss of each token and metrics: a mean would be trained on with another gradient.

    Args:
        name: of the policy loss.
        made: its result.
        log_probs: [T], the output that it differentiates.

    Raises:
        PluginError: the result is no pair, its loss is no tensor [T] or has no gradient, or a metric is none or has a taken name.
    """
    losses, metrics = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    shape = list(losses.shape) if torch.is_tensor(losses) else type(losses).__name__
    if shape != list(log_probs.shape) or not isinstance(metrics, Mapping):
        raise PluginError(
            f"algorithm.loss = '{name}' must return (losses, metrics): losses [T] = {list(log_probs.shape)}, one value a "
            f"token, which the engine weighs and sums, and a dict of metrics [T]. It returned {shape}"
            f"{'' if isinstance(metrics, Mapping) else ' and no dict of metrics'}."
        )
    if odd := [key for key, value in metrics.items() if not torch.is_tensor(value)]:
        raise PluginError(
            f"algorithm.loss = '{name}': metric '{odd[0]}' is a {type(metrics[odd[0]]).__name__}, expected a tensor [T]: "
            "one value a token, which the engine averages."
        )
    if taken := [key for key in metrics if key.removeprefix(LARGEST) in TAKEN]:
        raise PluginError(
            f"algorithm.loss = '{name}': metric '{taken[0]}' has the name of one that the engine logs. Rename it; taken are "
            f"{', '.join(TAKEN)}."
        )
    if log_probs.requires_grad and not losses.requires_grad:
        raise PluginError(
            f"algorithm.loss = '{name}' returned losses without a gradient: nothing would be learned. Compute them from "
            "outputs['log_probs'] without detach() or no_grad()."
        )


def policy(
    outputs: Mapping[str, Tensor],
    batch: Batch,
    *,
    token_loss: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    correction: Correction = Correction(),  # noqa: B008  frozen
    bypass: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the objective of a policy loss with correction, KL and entropy bonus, and metrics.

    Formula: ``sum_t w_t (c_t loss_t + kl_coef kl_t - entropy_coef H_t)``

    ``c_t`` is the correction between sampler and trainer, multiplied after the clip and without
    gradient: the importance weight, or 0 where the token is masked.

    Args:
        outputs: ``log_probs`` [T]; ``entropy`` [T] for a bonus or a metric.
        batch: ``weights``, ``token_share``, ``loss_mask``, ``rollout_log_probs`` [T] (without the last one the gap is
            neither measured nor corrected), and the columns of the loss; ``ref_log_probs`` [T] for a KL; ``learned``
            [T] bool if the loss is over some tokens only; ``fresh`` [T] bool if some tokens are of older policies.
        token_loss: the policy loss with its options bound.
        kl_coef: weight of the KL to the reference; 0 if the KL is in the reward.
        kl_estimator: one of ``regularizers.ESTIMATORS``.
        entropy_coef: weight of the entropy bonus.
        correction: correction of the gap between sampler and trainer.
        bypass: whether ``old_log_probs`` are the sampler's, so that the gap is between it and the current policy.
    """
    weights, share = batch["weights"], batch["token_share"]
    losses, watched = token_loss(outputs, batch)
    watched = with_prefix("actor/", watched)
    trained = outputs["log_probs"] if bypass else old_log_probs(outputs, batch)
    factor, noted = _corrected(outputs, batch, trained, correction)
    watched |= noted
    if "learned" in batch:
        factor = _times(factor, batch["learned"].to(losses.dtype))
        watched["actor/learned_share"] = batch["learned"].to(losses.dtype)
    total = _weighted_sum(weights, losses if factor is None else _masked(losses, factor))
    if "ref_log_probs" in batch:
        kl = kl_estimate(outputs["log_probs"], batch["ref_log_probs"], kl_estimator)
        watched["actor/kl"] = kl.detach()
        if kl_coef:
            total = total + kl_coef * _weighted_sum(weights, kl)
    if "teacher_log_probs" in batch:
        watched["actor/teacher_gap"] = (outputs["log_probs"] - batch["teacher_log_probs"]).detach()
    if "entropy" in outputs:
        watched["actor/entropy"] = outputs["entropy"].detach()
        if entropy_coef:
            total = total - entropy_coef * _weighted_sum(weights, outputs["entropy"])
    return total, over_tokens(watched, share)


def nll(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negative log-likelihood of the responses, for SFT.

    Formula: ``-sum_t w_t log p_t``

    Args:
        outputs: ``log_probs`` [T], with gradient.
        batch: ``weights`` [T], ``token_share`` [T].
    """
    losses = -outputs["log_probs"]
    return _weighted_sum(batch["weights"], losses), over_tokens(
        {"actor/nll": losses.detach()}, batch["token_share"]
    )


def value_objective(
    outputs: Mapping[str, Tensor], batch: Batch, *, value_clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the critic's objective ``sum_t w_t loss_t``, with the loss ``losses.value``.

    Args:
        outputs: ``values`` [T], with gradient.
        batch: ``weights``, ``token_share``, ``returns``, and ``values`` before the update, each [T].
        value_clip: width; None: no clip.
    """
    losses, watched = value_loss(outputs, batch, value_clip=value_clip)
    named = with_prefix("critic/", watched)
    return _weighted_sum(batch["weights"], losses), over_tokens(named, batch["token_share"])


def _corrected(
    outputs: Mapping[str, Tensor], batch: Batch, trained: Tensor, correction: Correction
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the factor of each token's loss [T] (None: 1) and metrics of the gap; None, {} without sampler log-probs."""
    if "rollout_log_probs" not in batch:
        return None, {}
    log_ratio = gap.rollout_log_ratio(batch, trained)
    watched = gap.mismatch_metrics(log_ratio)
    if "fresh" in batch:
        watched["mismatch/fresh_share"] = batch["fresh"].to(log_ratio.dtype)
        watched["mismatch/fresh_abs"] = watched["mismatch/fresh_share"] * watched["mismatch/mean_abs"]
    factor = gap.importance_weights(batch, log_ratio, correction)
    if factor is not None:
        watched["correction/capped_share"] = (
            gap.untruncated(batch, log_ratio, correction) >= correction.weight_cap
        ).to(factor.dtype)
    kept = gap.kept_tokens(batch, log_ratio, correction)
    if kept is not None:
        factor = _times(factor, kept.to(log_ratio.dtype))
        watched["correction/masked_share"] = (~kept).to(log_ratio.dtype)
    if correction.off_policy_threshold is not None:
        left = gap.left_behind(batch, outputs["log_probs"], correction.off_policy_threshold)
        factor = _times(factor, (~left).to(log_ratio.dtype))
        watched["correction/off_policy_share"] = left.to(log_ratio.dtype)
    if factor is not None:
        watched["correction/weight_mean"] = watched["max/correction/weight_max"] = factor
        watched["correction/weight_square"] = factor * factor
    return factor, watched


def _times(factor: Tensor | None, other: Tensor) -> Tensor:
    return other if factor is None else factor * other


def _masked(losses: Tensor, factor: Tensor) -> Tensor:
    """Return the product, which is 0 where the factor is 0, even if the loss is not finite there.

    The gradient there is 0 if the derivative of the loss is finite; that of ``ppo_clip`` is, for finite advantages.
    """
    return factor * torch.where(factor > 0, losses, torch.zeros_like(losses))


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Return the sum of weight times value; a token of weight 0 adds 0 even if its value is not finite."""
    return (weights * torch.where(weights > 0, values, torch.zeros_like(values))).sum()
