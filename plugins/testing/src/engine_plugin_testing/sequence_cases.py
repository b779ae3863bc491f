"""Random batches and losses for sequences of calls, with what a float64 reference gives for them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine_core.algorithms import objectives
from engine_core.types import LossCall
from engine_plugin_testing.contracts import close
from engine_plugin_testing.probes import PROBE, SIZE
from engine_plugin_testing.reference import ValueReference, probe_outputs, rows_of

if TYPE_CHECKING:
    from random import Random

    from torch import Tensor, nn

    from engine_core.types import Batch
    from engine_plugin_testing.train_bench import TrainBench

SIZES = ((7, 23, 1, 12, 5, 12, 2, 9), (33, 1, 64, 2), (16, 17, 15, 3), (9,), (40, 5, 8, 31, 1, 1))
POOLS = {
    "actor": ("log_probs", "entropy", "sum_pi_squared", "log_probs_at", "log_rest"),
    "critic": ("values",),
}
"""Outputs by role that the sequences ask for and differentiate."""
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "k3+")
LARGEST = 3.0  # of a token's loss, per nat of its log-prob: ratios are at most e


@dataclass
class Case:
    """A loss on a batch, and what a call of ``forward_backward`` must report."""

    batch: Batch
    call: LossCall
    loss: Tensor  # scalar, with a gradient
    metrics: dict[str, float]
    scales: Sequence[str]  # columns in which the loss is linear

    def multiplied(self, factor: float) -> Case:
        """Return the case with a loss that is ``factor`` times as large; the new loss has no gradient."""
        batch = self.batch.with_columns({name: factor * self.batch[name] for name in self.scales})
        return Case(batch, self.call, factor * self.loss.detach(), self.metrics, self.scales)

    def bound(self, tolerance: float) -> float:
        """Return how far the loss may be off if each output is known to ``tolerance``."""
        return 5 * LARGEST * tolerance * float(sum(self.batch[name].abs().sum() for name in self.scales))


def random_batch(bench: TrainBench, draws: Random, masks: Collection[str]) -> Batch:
    """Draw sizes, tokens, a temperature and a loss mask of one of the kinds ``prompt``, ``all``, ``some``, ``none``.

    Sequences may be dropped (they have no loss token), and some may stay together.
    """
    seed, temperature = draws.randrange(2**30), draws.choice((0.6, 1.0, 1.7))
    batch = bench.batch(draws.choice(SIZES), seed=seed, temperature=temperature)
    kind, generator = draws.choice(sorted(masks)), torch.Generator().manual_seed(seed)
    mask = batch["loss_mask"]
    if kind in ("all", "some", "none"):
        mask = (
            torch.rand(batch.num_tokens, generator=generator) < {"all": 2.0, "some": 0.5, "none": -1.0}[kind]
        )
        mask[1] = kind != "none"
    noise = 0.5 + torch.rand(batch.num_tokens, generator=generator)
    drops, groups, aggregates = (torch.rand(3, generator=generator) < 0.5).tolist()
    if drops:
        dropped = torch.rand(len(batch), generator=generator) < 0.3
        dropped[0] = False
        mask = mask & ~batch.to_tokens(dropped)
    share = mask / mask.sum().clamp(min=1)
    batch = batch.with_columns({"loss_mask": mask, "token_share": share, "weights": share * noise})
    if groups:
        ids = torch.randint(len(batch), (len(batch),), generator=generator)
        batch = batch.with_columns({}, {SIZE: ids.bincount()[ids]})
        batch.keep_together = ids
    return _aggregated(batch, generator) if aggregates else batch


def _aggregated(batch: Batch, generator: torch.Generator) -> Batch:
    """Return the batch with the core's weights of a random aggregation, compared with its formula in float64."""
    mode, length = MODES[int(torch.randint(len(MODES), (), generator=generator))], 7
    mask = batch["loss_mask"].double()
    sizes = batch.sum_by_sequence(mask)
    tokens, sequences = float(mask.sum().clamp(min=1)), float((sizes > 0).sum().clamp(min=1))
    expected = {
        "token-mean": mask / tokens,
        "token-sum": mask,
        "seq-mean-token-sum": mask / sequences,
        "seq-mean-token-mean": mask / (batch.to_tokens(sizes.clamp(min=1)) * sequences),
        "seq-mean-token-sum-norm": mask / (length * sequences),
    }[mode]
    what = f"weights of {mode}, {len(batch)} sequences, {sequences:g} of them with loss tokens"
    divisor = objectives.normalizer(mode, tokens, sequences)
    unit = 2.0 ** math.ceil(math.log2(divisor))
    part = objectives.with_weights(batch, mode, length, unit)  # of a mini-batch that is not complete yet
    close(unit / divisor * part["weights"], expected, 1e-6, f"{what}, scaled later")
    made = objectives.with_weights(batch, mode, length)
    close(made["weights"], expected, 1e-6, what)
    close(made["token_share"], mask / tokens, 1e-6, "token_share")
    return made


def with_columns_of(batch: Batch, draws: Random, names: Sequence[str], support: bool) -> Batch:
    """Return the batch with random candidates, coefficients of the outputs ``names``, a metric and perhaps a support."""
    generator = torch.Generator().manual_seed(draws.randrange(2**30))
    total, width = batch.num_tokens, draws.choice((1, 3, 6))
    ids = torch.rand(total, 95, generator=generator).argsort(-1)[:, :width] + 2
    columns = {"candidate_ids": ids, "probe/metric": 3 + torch.randn(total, generator=generator)}
    for name in names:
        shape = ids.shape if name == "log_probs_at" else (total,)
        columns[f"probe/{name}"] = torch.randn(shape, generator=generator)
    if support:
        kept = torch.cat([batch.token_ids[:, None], ids], -1).int()
        kept[:, 1:][kept[:, 1:] == kept[:, :1]] = -1
        kept[torch.rand(total, generator=generator) < 0.3] = -1
        columns["support_ids"] = kept
    return batch.with_columns(columns)


def learned(batch: Batch) -> Tensor:
    """Return [T] bool: the loss tokens that have a token before them."""
    mask = batch["loss_mask"].clone()
    mask[batch.offsets[:-1]] = False
    return mask


def expected_outputs(module: nn.Module, batch: Batch, names: Collection[str]) -> dict[str, Tensor]:
    """Return the reference's outputs by name: [T] or [T, K], 0 where nothing is learned."""
    if isinstance(module, ValueReference):
        return {name: module.outputs_of(batch)[name] for name in names}
    return probe_outputs(module, batch, names)


def expected_top(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the reference's ``top_log_probs`` [T, K] and ``top_log_rest`` [T]."""
    mask = learned(batch)
    rows = rows_of(module, batch).sort(-1, descending=True).values
    first, rest = rows[:, : batch.top_k], rows[:, batch.top_k :].logsumexp(-1)
    return {"top_log_probs": first * mask[:, None], "top_log_rest": rest * mask}


LOSSES = {"actor": ("nll", "policy", PROBE, PROBE), "critic": ("value", PROBE)}
"""Objectives by role."""


def random_case(bench: TrainBench, draws: Random, module: nn.Module, role: str, *kinds: str) -> Case:
    """Draw a loss on a random batch: an objective of ``kinds``, by default of all of the role's, with random options."""
    kind = draws.choice(kinds or LOSSES[role])
    pool = {"nll": ("log_probs",), "policy": ("log_probs", "entropy"), "value": ("values",)}.get(kind)
    names = pool or draws.sample(POOLS[role], draws.randint(1, min(3, len(POOLS[role]))))
    batch = random_batch(bench, draws, ("prompt", "all", "some"))
    support = "log_probs" in names and "support" in bench.capabilities and draws.random() < 0.3
    batch = with_columns_of(batch, draws, names, support)
    found = expected_outputs(module, batch, names)
    if kind == PROBE:
        return _probe(draws, batch, found)
    return _of_tokens(draws, kind, batch, found)


def _probe(draws: Random, batch: Batch, found: dict[str, Tensor]) -> Case:
    """Build the case of ``probes.probe``; the last of several outputs may be only watched."""
    names, mask, values = tuple(found), batch["loss_mask"], batch["probe/metric"].double()
    trained = names[:-1] if len(names) > 1 and draws.random() < 0.3 else names
    parts = [batch[f"probe/{n}"] * (found[n] if n in trained else found[n].detach()) for n in names]
    most = float(values[mask].max())
    metrics = {"kit/mean": float(values[mask].mean()), "kit/count": float(mask.sum()), "max/kit/high": most}
    call = LossCall(PROBE, outputs=trained, watched=names[len(trained) :])
    loss = torch.stack([part.sum() for part in parts]).sum()
    return Case(batch, call, loss, {**metrics, "max/kit/low": most - 100}, [f"probe/{n}" for n in names])


def _of_tokens(draws: Random, kind: str, batch: Batch, found: dict[str, Tensor]) -> Case:
    """Build the case of a weighted sum over tokens: ``nll``, the clipped policy loss with KL and entropy, or ``value``."""
    generator = torch.Generator().manual_seed(draws.randrange(2**30))
    values = found[next(iter(found))]
    metrics: dict[str, float] = {}
    parameters: dict[str, Any] = {}
    columns: dict[str, Tensor] = {}
    if kind == "nll":
        losses = -values
        metrics["actor/nll"] = float((batch["token_share"] * losses.detach()).sum())
    elif kind == "value":
        columns["values"] = values.detach().float()
        columns["returns"] = columns["values"] + torch.randn(values.shape, generator=generator)
        losses, parameters = (values - columns["returns"]) ** 2 / 2, {"value_clip": None}
    else:
        clip, kl, bonus = draws.choice((0.2, 0.4)), draws.choice((0.0, 0.3)), draws.choice((0.0, 0.1))
        shift = torch.randint(-1, 2, values.shape, generator=generator)  # in nats: no ratio is near the clip
        columns["old_log_probs"] = (values.detach() + shift).float()
        columns["ref_log_probs"] = (values.detach() + torch.randn(values.shape, generator=generator)).float()
        ratio, advantages = (values - columns["old_log_probs"]).exp(), batch["advantages"]
        losses = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip, 1 + clip) * advantages)
        estimator = ESTIMATORS[int(torch.randint(len(ESTIMATORS), (), generator=generator))]
        apart = values - columns["ref_log_probs"]
        losses = losses + kl * _kl(apart, estimator) - bonus * found["entropy"]
        table = {"clip_ratio_low": clip, "clip_ratio_high": clip}
        parameters = {"loss": "ppo_clip", "loss_options": table, "entropy_coef": bonus}
        parameters |= {"kl_coef": kl, "kl_estimator": estimator}
    call = LossCall(kind, parameters, outputs=tuple(found))
    loss = (batch["weights"] * losses).sum()
    return Case(batch.with_columns(columns), call, loss, metrics, ("weights",))


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
