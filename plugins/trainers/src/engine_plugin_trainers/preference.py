"""Learning from preferences: the base of its trainers, and DPO with its variants.

A step takes `data.prompts_per_step` pairs (or judged responses), computes log-probs of the reference and of the current
policy if the loss needs them, and makes one optimizer step.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from engine_core.algorithms.objectives import resolve_loss
from engine_core.contracts.runtime import Role
from engine_core.data.rows import open_rows
from engine_core.data.source import Source
from engine_core.errors import ConfigError
from engine_core.train.run import TrainingRun
from engine_core.types import Batch, LossCall
from engine_plugin_trainers.algorithms import preference_columns as columns
from engine_plugin_trainers.data.preferences import Pair, PairPreparer
from engine_plugin_trainers.models import table_length
from engine_plugin_trainers.options import READABLE, check_offered

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.config.models import DataConfig
    from engine_plugin_trainers.options import DPOOptions
    from engine_plugin_trainers.tables import PairLoss


class PreferenceRun(TrainingRun):
    """A base of trainers whose step is one update over a mini-batch of preferences.

    A subclass names what prepares its rows, packs items into a batch, and defines the loss and the columns that it reads.
    """

    role = "actor"  # role of the model that learns
    table: ClassVar[str]  # name of the trainer's option table
    preparer: ClassVar[type[PairPreparer]] = PairPreparer

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return False

    @abc.abstractmethod
    def batch(self, items: Sequence[Any]) -> Batch:
        """Pack items into a batch with their weights."""

    def annotate(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Add columns that need a model; return the batch and metrics."""
        if not self.needs_reference:
            return batch, {}
        return batch.with_columns(tokens={"ref_log_probs": self.reference_log_probs(batch)}), {}

    def defined(self, metrics: Mapping[str, float], batch: Batch) -> dict[str, float]:
        """Return those metrics of the loss that are defined for a mini-batch."""
        return dict(metrics)

    @abc.abstractmethod
    def loss_call(self) -> LossCall:
        """Return the name of the objective and its parameters."""

    def roles(self, training: bool) -> dict[str, Role]:
        """Return the model that learns and, if the loss needs it, the reference."""
        ref = {"ref": Role("train", trainable=False)}
        learns = {self.role: Role("train", trainable=training)}
        return learns | (ref if self.needs_reference else {})

    def source_of(self, split: str, data: DataConfig, rows: Any) -> Source[Any]:
        """Open the rows of a split as pairs or judged responses."""
        most, held = self.config.options.max_tokens, table_length(self.text_config)
        opened = open_rows(data, split, rows)
        preparer = self.preparer(opened, self.tokenizer, data, split, most, self.table, held)
        return Source(preparer, self.config.run.seed)

    def step(self, step: int) -> dict[str, float]:
        """Take a mini-batch, annotate it, and make one update."""
        batch = self.batch(self.source.take(self.config_now.data.prompts_per_step))
        with self.phase("log_probs"):
            batch, noted = self.annotate(batch)
        with self.phase("train"):
            metrics = self.defined(self.learn(batch, self.loss_call()), batch)
        return metrics | noted | {"tokens/total": float(batch.num_tokens)}

    def evaluate(self, out: Path | None = None) -> dict[str, float]:
        """Return ``eval/...`` metrics: the loss and its metrics on each held-out set as one mini-batch."""
        self.setup()
        metrics: dict[str, float] = {}
        for held_out in self.held_out():
            batch, noted = self.annotate(self.batch(self.held_items(held_out)))
            call: LossCall = self.loss_call()
            names = (*call.outputs, *call.watched)
            outputs = self.groups[self.role].call("infer", batch, outputs=names).result()
            loss, measured = resolve_loss(call, self.plugins)(outputs, batch)
            found = self.defined({name: float(value) for name, value in measured.items()}, batch)
            found |= {**noted, "loss": float(loss)}
            metrics |= {held_out.prefix + name.removeprefix("actor/"): value for name, value in found.items()}
        return metrics

    def reference_log_probs(self, batch: Batch) -> torch.Tensor:
        """Return log-probs [T] of the reference model."""
        return self.groups["ref"].call("infer", batch, outputs=("log_probs",)).result()["log_probs"]


def pair_batch(pairs: Sequence[Pair]) -> Batch:
    """Pack pairs into a batch of B = 2P sequences: each chosen one before its rejected one, kept together.

    Columns: ``loss_mask`` [T] bool, True on responses; ``chosen`` [B] bool; ``margin`` [B]; and the weights of
    ``with_shares``.
    """
    sides = [
        side
        for pair in pairs
        for side in ((pair.chosen_ids, pair.chosen_mask), (pair.rejected_ids, pair.rejected_mask))
    ]
    packed = Batch(
        token_ids=torch.tensor([token for ids, _ in sides for token in ids], dtype=torch.int64),
        lengths=torch.tensor([len(ids) for ids, _ in sides], dtype=torch.int64),
        tokens={"loss_mask": torch.tensor([m for _, mask in sides for m in mask], dtype=torch.bool)},
        sequences={
            "chosen": torch.tensor([True, False]).repeat(len(pairs)),
            "margin": torch.tensor([pair.margin for pair in pairs]).repeat_interleave(2),
        },
        keep_together=torch.arange(len(pairs)).repeat_interleave(2),
    )
    return columns.with_shares(packed)


class DPOTrainer(PreferenceRun):
    """A trainer that learns which of two responses is better: DPO and its variants, ORPO, SimPO and CPO."""

    table = "dpo"

    def prepare(self) -> None:
        """Resolve the loss and check its options.

        Raises:
            ConfigError: a key of ``[dpo]`` does not fit the loss.
        """
        check_offered(self.config.options.loss, self.spec)
        self.plugins.function("pair_losses", self.config.options.loss)  # before a worker resolves it
        try:
            self.options.judge(self.spec)
        except ValueError as error:
            raise ConfigError(f"dpo: {error}") from None

    @functools.cached_property
    def spec(self) -> PairLoss:
        """Declaration of the pair loss."""
        return cast("PairLoss", self.plugins.spec("pair_losses", self.config.options.loss))

    @property
    def options(self) -> DPOOptions:
        """Options of ``[dpo]`` at this step."""
        options: DPOOptions = self.config_now.options
        return options

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.spec.reference and not self.options.reference_free

    def batch(self, items: Sequence[Pair]) -> Batch:
        """Pack pairs into a batch, with LD-DPO's weights of tokens if asked for."""
        batch = pair_batch(items)
        if self.options.ld_alpha is None:
            return batch
        return batch.with_columns(tokens={"tail_weights": columns.tail_weights(batch, self.options.ld_alpha)})

    def loss_call(self) -> LossCall:
        """Return the objective ``preference`` with the options that it reads."""
        options = self.options
        names = ("loss", "beta", "f_divergence", "f_alpha", "wpo", *READABLE)
        parameters = {name: getattr(options, name) for name in names}
        parameters |= {"normalise": options.normalizes(self.spec), "sft_coef": options.nll_weight(self.spec)}
        return LossCall("preference", parameters, watched=("sum_pi_squared",) if options.wpo else ())
