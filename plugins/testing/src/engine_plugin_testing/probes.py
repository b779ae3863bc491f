"""Objectives of the kit alone: they differentiate any output, and have metrics of every kind.

A batch has the column ``probe/NAME`` for each output of the call, and ``probe/metric`` for the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_core.plugins.plugin_set import Plugin
from engine_core.specs import Objective

if TYPE_CHECKING:
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.types import Batch, LossCall

PROBE, PAIRS, SHORT = "kit_probe", "kit_pairs", "kit_short"
SIZE = "kit/group_size"
"""Column [B]: the number of sequences of a batch that stay together with each."""
SHORTAGES: list[type[BaseException] | None] = []
"""The errors of the next backward passes of ``short`` in this process."""


class Stopped(BaseException):
    """A stop that ends a call wherever it is, as a signal does."""


class Shortage(torch.autograd.Function):
    """The identity, whose backward pass raises what ``SHORTAGES`` says."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """Return a copy of ``value`` (``[*S]``)."""
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return ``gradient`` (``[*S]``), or raise the error of this pass."""
        error = SHORTAGES.pop(0) if SHORTAGES else None
        if error is not None:
            raise error("as the kit requested")
        return gradient


def plan_metrics(batch: Batch) -> dict[str, float]:
    """Return metrics of the plan of micro-batches, of which this batch is one.

    ``max/kit/tokens`` are the tokens of a micro-batch with several units that may be separated, else 0. ``max/kit/apart``
    are the sequences of a group that a micro-batch lacks, if the batch has their number.
    """
    ids = torch.arange(len(batch)) if batch.keep_together is None else batch.keep_together.cpu()
    metrics = {"max/kit/tokens": float(batch.num_tokens if len(ids.unique()) > 1 else 0)}
    if SIZE in batch:
        metrics["max/kit/apart"] = float((batch[SIZE].cpu() - ids.bincount()[ids]).max())
    return metrics


def probe(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``sum_t c_t output_t`` over the outputs [T] with coefficients, and metrics: a mean, a count, maxima.

    They include those of ``plan_metrics``.
    """
    named = {f"probe/{name}": value for name, value in outputs.items() if f"probe/{name}" in batch}
    total = sum(((batch[name] * value).sum() for name, value in named.items()), start=0.0)
    values, mask = batch["probe/metric"], batch["loss_mask"]
    metrics = {"kit/mean": (batch["token_share"] * values).sum(), "kit/count": mask.sum().to(values.dtype)}
    most = values.masked_fill(~mask, -torch.inf).max()  # of no loss token: less than any other
    metrics |= {"max/kit/high": most, "max/kit/low": most - 100}
    metrics |= {name: torch.full_like(most, value) for name, value in plan_metrics(batch).items()}
    return total, metrics  # type: ignore[return-value]


def pairs(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``sum_k (sum_i s_i sum_t w_t log p_t)^2`` of ``log_probs`` [T], over groups k of sequences i: it changes if a group is split."""
    sums = batch["sign"] * batch.sum_by_sequence(batch["weights"] * outputs["log_probs"])
    together = batch.keep_together
    assert together is not None
    total = sums.new_zeros(int(together.max()) + 1).index_add(0, together, sums)
    loss = (total**2).sum()
    return loss, {name: torch.full_like(loss.detach(), value) for name, value in plan_metrics(batch).items()}


def short(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-sum_t w_t log p_t`` over ``log_probs`` [T]; the backward pass raises what ``SHORTAGES`` says."""
    return Shortage.apply(-(batch["weights"] * outputs["log_probs"]).sum()), {}


def probed(batch: Batch, *names: str) -> Batch:
    """Return the batch with random coefficients of outputs, candidates, a support and a metric."""
    generator = torch.Generator().manual_seed(11)
    total = batch.num_tokens
    ids = torch.rand(total, 95, generator=generator).argsort(-1)[:, :6] + 2
    support = ids.clone().int()
    support[:, 0] = batch.token_ids  # the token was drawn, so the support contains it
    support[:, 1:][support[:, 1:] == support[:, :1]] = -1
    support[::3] = -1
    columns = {f"probe/{name}": torch.randn(total, generator=generator) for name in names}
    if "probe/log_probs_at" in columns:
        columns["probe/log_probs_at"] = torch.randn(total, 6, generator=generator)
    columns |= {"candidate_ids": ids, "probe/metric": torch.randn(total, generator=generator)}
    return batch.with_columns(columns | {"support_ids": support})


def coefficients(loss: LossCall) -> set[str]:
    """Return the names of the columns that scale the objective ``probe``."""
    return {f"probe/{name}" for name in (*loss.outputs, *loss.watched)}


def offer(plugins: PluginSet) -> None:
    """Add the objectives to a set of plugins."""
    if plugins.find("objectives", PROBE) is None:
        plugin = Plugin(ModuleType("engine_plugin_testing_objectives"), "the kit", "the kit", "")
        for name, function in ((PROBE, probe), (PAIRS, pairs), (SHORT, short)):
            plugins.chosen["objectives", name] = Objective(load=function), plugin
