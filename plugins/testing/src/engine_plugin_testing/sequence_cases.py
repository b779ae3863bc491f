"""Random batches and losses for sequences of calls, with what a float64 reference gives for them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from engine_core.algorithms import objectives
from engine_core.types import LossCall
from engine_plugin_testing.contracts import close
from engine_plugin_testing.probes import PROBE, SIZE
from engine_plugin_testing.reference import EOS, ValueReference, probe_outputs, rows_of
from engine_plugin_testing.sequence_policy import policy_case

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
LARGEST = 3.0  # of a token's loss, per nat of its log-prob: ratios are at most e


@dataclass
class Case:
    """A loss on a batch, and what a call of ``forward_backward`` must report."""

    batch: Batch
    call: LossCall
    loss: Tensor  # scalar, with a gradient
    metrics: dict[str, float]
    scales: Sequence[str]  # columns in which the loss is linear
    means: dict[str, float] = field(default_factory=dict)  # further metrics, of a size of about 1 nat
    largest: float = 1.0  # factor of a token's loss

    def multiplied(self, factor: float) -> Case:
        """Return the case with a loss that is ``factor`` times as large; the new loss has no gradient."""
        batch = self.batch.with_columns({name: factor * self.batch[name] for name in self.scales})
        return replace(self, batch=batch, loss=factor * self.loss.detach())

    def bound(self, tolerance: float) -> float:
        """Return how far the loss may be off if each output is known to ``tolerance``."""
        return (
            5
            * LARGEST
            * self.largest
            * tolerance
            * float(sum(self.batch[name].abs().sum() for name in self.scales))
        )


def random_batch(bench: TrainBench, draws: Random, masks: Collection[str]) -> Batch:
    """Draw sizes, tokens, a temperature and a loss mask of one of the kinds ``prompt``, ``all``, ``some``, ``none``.

    Sequences may be dropped (they have no loss token), some may stay together, and some begin as others do. The token
    that ends a response is anywhere.
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
    drops, groups, aggregates, shares = (torch.rand(4, generator=generator) < 0.5).tolist()
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
    if shares:
        batch = replace(batch, token_ids=_with_prefixes(batch, generator))
    batch = _aggregated(batch, generator) if aggregates else batch
    ends = torch.rand(batch.num_tokens, generator=generator) < 0.1
    return replace(batch, token_ids=batch.token_ids.masked_fill(ends, EOS))


def _with_prefixes(batch: Batch, generator: torch.Generator) -> Tensor:
    """Return token ids [T] where half of the sequences begin as the one before, or as the first, and equal it elsewhere too."""
    parts = list(batch.token_ids.clone().split(batch.lengths.tolist()))
    for number in range(1, len(parts)):
        like, begins, equals = torch.randint(2, (3,), generator=generator).tolist()
        source, target = parts[(number - 1) * like], parts[number]
        most = min(len(source), len(target))
        common = int(torch.randint(most + 1, (), generator=generator)) if begins else 0
        same = torch.arange(most) < common
        if equals:
            same |= torch.rand(most, generator=generator) < 0.3
        target[:most] = torch.where(same, source[:most], target[:most])
    return torch.cat(parts)


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
    unit = 2.0 ** (1 + math.ceil(math.log2(divisor)))
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
    return _of_tokens(draws, kind, batch, found, bench.tolerance < 1e-3)


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


def _of_tokens(draws: Random, kind: str, batch: Batch, found: dict[str, Tensor], exact: bool) -> Case:
    """Build the case of a weighted sum over tokens: ``nll``, the clipped policy loss with KL and entropy, or ``value``."""
    generator = torch.Generator().manual_seed(draws.randrange(2**30))
    values = found[next(iter(found))]
    metrics: dict[str, float] = {}
    parameters: dict[str, Any] = {}
    columns: dict[str, Tensor] = {}
    means: dict[str, float] = {}
    largest, outputs = 1.0, (tuple(found), tuple[str, ...]())
    if kind == "nll":
        losses = -values
        metrics["actor/nll"] = float((batch["token_share"] * losses.detach()).sum())
    elif kind == "value":
        losses, columns, means = _value_losses(batch, values, generator, parameters)
    else:
        made = policy_case(draws, batch, found, exact, generator)
        losses, parameters, columns, means = made.losses, made.parameters, made.columns, made.metrics
        largest, outputs = made.largest, (made.outputs, made.watched)
    call = LossCall(kind, parameters, *outputs)
    loss = (batch["weights"] * losses).sum()
    return Case(batch.with_columns(columns), call, loss, metrics, ("weights",), means, largest)


def _value_losses(
    batch: Batch, values: Tensor, generator: torch.Generator, parameters: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """Return the losses [T] of a critic's ``values`` [T], the columns and the metrics; draw the clip into ``parameters``."""
    clip = (None, 0.5, 1.5)[int(torch.randint(3, (), generator=generator))]
    shift = torch.randint(-2, 3, values.shape, generator=generator)  # no value is near the edge of the clip
    old = (values.detach() + shift).float()
    returns = (values.detach() + torch.randn(values.shape, generator=generator)).float()
    error = clipped = (values - returns) ** 2
    if clip is not None:
        clipped = (old.double() + (values - old).clamp(-clip, clip) - returns) ** 2
    parameters["value_clip"] = clip
    share = batch["token_share"].double()
    means = {
        "critic/value_mean": float((share * values.detach()).sum()),
        "critic/return_mean": float((share * returns).sum()),
        "critic/clip_fraction": float((share * (clipped > error + 1e-9)).sum()),
    }
    return torch.maximum(error, clipped) / 2, {"values": old, "returns": returns}, means
