"""The objective ``policy`` with random options, and its loss and metrics from their formulas in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from torch import Tensor

    from engine_core.types import Batch

ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "k3+")
STEP = 0.8  # nats: differences of log-probs are whole numbers of it, and no bound is near one
BOUNDS = {"token": (0.5, 5.0), "sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}
"""Of masks, where none are set."""
SET_BOUNDS = {"token": (0.4, 3.0), "sequence": (0.3, 3.0), "geometric": (0.51, 2.1), "off": (None, None)}


@dataclass
class Policy:
    """The loss of each token, what the objective is given, and the metrics that it must report."""

    losses: Tensor  # [T], with gradient
    parameters: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)  # of tokens, [T]
    metrics: dict[str, float] = field(default_factory=dict)
    largest: float = 1.0  # factor of a token's loss
    outputs: tuple[str, ...] = ("log_probs", "entropy")
    watched: tuple[str, ...] = ()  # may also be in ``outputs``, as in a run with an entropy bonus


class _Draws:
    """Random choices from a generator of torch."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def choice(self, *values: Any) -> Any:
        """Return one of some values."""
        return values[int(torch.randint(len(values), (), generator=self.generator))]

    def shifts(self, count: int, most: int = 1) -> Tensor:
        """Return [COUNT] float64: whole numbers of ``STEP`` between ``-most`` and ``most``."""
        return STEP * torch.randint(-most, most + 1, (count,), generator=self.generator).double()

    def flags(self, count: int, share: float) -> Tensor:
        """Return [COUNT] bool, True with probability ``share``."""
        return torch.rand(count, generator=self.generator) < share


def policy_case(
    draws: Random, batch: Batch, found: Mapping[str, Tensor], exact: bool, generator: torch.Generator
) -> Policy:
    """Draw options of the objective ``policy``, and compute it.

    Args:
        draws: source of the clip and of the coefficients.
        batch: ``advantages``, ``loss_mask``, ``token_share`` [T].
        found: ``log_probs`` and ``entropy`` [T] of the reference, with gradient.
        exact: log-probs of the engine are exact enough to be compared with a bound.
        generator: source of everything else.
    """
    values, count = found["log_probs"], batch.num_tokens
    clip, kl, bonus = draws.choice((0.2, 0.4)), draws.choice((0.0, 0.3)), draws.choice((0.0, 0.1))
    shift = torch.randint(-1, 2, values.shape, generator=generator)  # in nats: no ratio is near the clip
    last = _Draws(torch.Generator().manual_seed(generator.initial_seed() + 1))  # of what was added later
    unchanged = exact and last.choice(True, False, False, False)  # the policy, since it was measured
    old = values.detach() if unchanged else (values.detach() + shift).float()
    ref = (values.detach() + torch.randn(values.shape, generator=generator)).float()
    more = _Draws(generator)
    estimator = more.choice(*ESTIMATORS)
    table: dict[str, Any] = {"clip_ratio_low": clip, "clip_ratio_high": more.choice(clip, 0.3)}
    table |= {"delta": more.choice(None, None, 1.9), "clip_ratio_c": more.choice(None, 1.8)}
    made = Policy(values, {"loss": "ppo_clip", "loss_options": table, "entropy_coef": bonus})
    made.parameters |= {"kl_coef": kl, "kl_estimator": estimator}
    if last.choice(True, False):
        table = {**table, "clip_ratio": clip}
        made.parameters["loss_options"] = {n: v for n, v in table.items() if n != "clip_ratio_low"}
    made.columns = {"ref_log_probs": ref} if unchanged else {"old_log_probs": old, "ref_log_probs": ref}
    if last.choice(True, False):
        gap = 0.3 * torch.randn(values.shape, generator=last.generator)
        made.columns["teacher_log_probs"] = (values.detach() - gap).float()
        made.metrics["actor/teacher_gap"] = _mean(batch, gap)
    log_ratio = values - old
    losses = _clipped(made, batch, log_ratio, table)
    factor = _corrected(made, batch, values.detach(), old.double(), exact, more)
    if more.choice(True, False, False):
        made.columns["learned"] = more.flags(count, 0.6)
        made.metrics["actor/learned_share"] = _mean(batch, made.columns["learned"].double())
        factor = factor * made.columns["learned"]
    apart = _kl(values - ref, estimator)
    made.metrics |= {"actor/kl": _mean(batch, apart), "actor/entropy": _mean(batch, found["entropy"])}
    made.losses = factor * losses + kl * apart - bonus * found["entropy"]
    made.watched = more.choice((), ("entropy",))
    if made.watched and not bonus:
        made.outputs = ("log_probs",)
    made.largest = max(1.0, float(factor.max()))
    return made


def _clipped(made: Policy, batch: Batch, log_ratio: Tensor, table: Mapping[str, Any]) -> Tensor:
    """Return the clipped loss [T] of ``ppo_clip``, and add its metrics."""
    ratio, advantages = log_ratio.exp(), batch["advantages"]
    plain = -(ratio if table["delta"] is None else ratio.clamp(max=table["delta"])) * advantages
    clipped = -ratio.clamp(1 - table["clip_ratio_low"], 1 + table["clip_ratio_high"]) * advantages
    losses = torch.maximum(plain, clipped)
    if table["clip_ratio_c"] is not None:
        most = -table["clip_ratio_c"] * advantages
        losses = torch.where(advantages < 0, torch.minimum(losses, most), losses)
    made.metrics |= {
        "actor/ratio_mean": _mean(batch, ratio),
        "actor/approx_kl": _mean(batch, ratio - 1 - log_ratio),
        "actor/clip_fraction": _mean(batch, (clipped > plain + 1e-9).double()),
    }
    return losses


def _corrected(made: Policy, batch: Batch, values: Tensor, old: Tensor, exact: bool, more: _Draws) -> Tensor:
    """Draw a correction of the sampler's gap; return the factor [T] of each token's loss, and add the metrics.

    Args:
        made: gets the column ``rollout_log_probs``, and the options.
        batch: the batch.
        values: log-probs [T] of the policy in training.
        old: log-probs [T] of the policy before this step's updates.
        exact: whether they can be compared with bounds.
        more: the source of choices.
    """
    mask, count = batch["loss_mask"], batch.num_tokens
    bypass = exact and more.choice(True, False, False)
    one = torch.ones(count, dtype=torch.float64)
    way = batch.to_tokens(more.shifts(len(batch)))  # one shift for all tokens of a sequence
    gap = more.choice(more.shifts(count), way) * more.flags(count, more.choice(0.4, 1.0))
    gap = gap * batch.to_tokens(more.flags(len(batch), 0.7)) * mask
    trained = values if bypass else old
    made.columns["rollout_log_probs"] = (trained - gap).float()
    moved = (values - made.columns["rollout_log_probs"]) * mask  # the policy in training, from the sampler
    table: dict[str, Any] = {"level": more.choice("off", "token", "sequence")}
    table["cap"] = more.choice(None, None, 1.7)
    masks = ("off", table["level"], table["level"], "token", "sequence", "geometric", "geometric")
    table["mask"] = more.choice(*masks)
    table["mask_low"], table["mask_high"] = more.choice((None, None), SET_BOUNDS[table["mask"]])
    table |= {"reject": more.choice("off", "off", "k1", "k2", "k3"), "reject_ratio": 1.31}
    table |= {"off_policy_threshold": more.choice(None, 0.3137) if exact else None}
    made.parameters |= {"correction": table, "bypass": bypass}
    made.metrics |= {
        "mismatch/kl": _mean(batch, gap.exp() - 1 - gap),
        "mismatch/mean_abs": _mean(batch, gap.abs()),
    }
    made.metrics["max/mismatch/max_abs"] = float(gap[mask].abs().max())
    if more.choice(True, False):
        fresh = made.columns["fresh"] = more.flags(count, 0.5)
        made.metrics["mismatch/fresh_share"] = _mean(batch, fresh.double())
        made.metrics["mismatch/fresh_abs"] = _mean(batch, fresh * gap.abs())
    factor, used = one, False
    if table["level"] != "off":
        used, weights = True, _weights(made, batch, gap, table)
        factor = weights
        if more.choice(True, False):
            made.columns["correction_scale"] = torch.where(mask, 1.25, 9.0)
            factor = made.columns["correction_scale"] * factor
    kept = _kept(batch, gap, table)
    if kept is not None:
        used, factor = True, factor * kept
        made.metrics["correction/masked_share"] = _mean(batch, (~kept).double())
    if table["off_policy_threshold"] is not None:
        far = -_mean_of_sequences(batch, moved) > table["off_policy_threshold"]
        left = far & (batch["advantages"] < 0)
        used, factor = True, factor * ~left
        made.metrics["correction/off_policy_share"] = _mean(batch, left.double())
    if used:
        made.metrics |= {
            "correction/weight_mean": _mean(batch, factor),
            "correction/weight_square": _mean(batch, factor**2),
            "max/correction/weight_max": float(factor[batch["token_share"] > 0].max()),
        }
    return factor


def _weights(made: Policy, batch: Batch, gap: Tensor, table: Mapping[str, Any]) -> Tensor:
    """Return the truncated importance weights [T], and add their metric."""
    whole = batch.to_tokens(batch.sum_by_sequence(gap)) if table["level"] == "sequence" else gap
    same = table["mask"] == table["level"]
    cap = table["cap"] or (_bounds(table)[1] if same else 2.0)
    made.metrics["correction/capped_share"] = _mean(batch, (whole.exp() >= cap).double())
    return whole.exp().clamp(max=cap)


def _bounds(table: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bounds of a mask."""
    low, high = BOUNDS[table["mask"]]
    return table["mask_low"] or low, table["mask_high"] or high


def _kept(batch: Batch, gap: Tensor, table: Mapping[str, Any]) -> Tensor | None:
    """Return the tokens [T] that mask and rejection keep; None if both are off."""
    kept = None
    if table["mask"] != "off":
        low, high = (math.log(bound) for bound in _bounds(table))
        whole = {"token": gap, "sequence": batch.to_tokens(batch.sum_by_sequence(gap))}
        measured = whole.get(table["mask"], _mean_of_sequences(batch, gap))
        kept = (measured >= low) & (measured <= high)
    if table["reject"] != "off":
        measured = _mean_of_sequences(batch, _divergence(gap, table["reject"])).abs()
        bound = _divergence(torch.tensor(math.log(table["reject_ratio"])).double(), table["reject"]).abs()
        near = measured <= bound
        kept = near if kept is None else kept & near
    return kept


def _divergence(gap: Tensor, estimator: str) -> Tensor:
    """Return the estimate of the KL of sampler and trainer at each token, in nats; same shape as ``gap`` [...]."""
    return {"k1": -gap, "k2": gap**2 / 2, "k3": torch.expm1(gap) - gap}[estimator]


def _mean_of_sequences(batch: Batch, values: Tensor) -> Tensor:
    """Return the mean of ``values`` [T] over the loss tokens of each sequence, at its tokens: [T]."""
    counts = batch.sum_by_sequence(batch["loss_mask"].double()).clamp(min=1)
    return batch.to_tokens(batch.sum_by_sequence(values * batch["loss_mask"]) / counts)


def _mean(batch: Batch, values: Tensor) -> float:
    """Return the mean of ``values`` [T] over loss tokens."""
    return float((batch["token_share"].double() * values.detach()).sum())


def _kl(apart: Tensor, estimator: str) -> Tensor:
    """Return the estimate [T] of KL(policy || reference) from the difference of their log-probs, ``apart`` [T].

    A ``+`` stands for the gradient of k2.
    """
    values = {
        "k1": apart,
        "abs": apart.abs(),
        "k2": apart**2 / 2,
        "k3": torch.expm1(-apart) + apart,
    }
    if estimator in values:
        return values[estimator]
    return values[estimator[:2]].detach() + values["k2"] - values["k2"].detach()
