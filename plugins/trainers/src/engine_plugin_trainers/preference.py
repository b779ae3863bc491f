"""Learning from preferences: the base of its trainers, and DPO with its variants.

A step takes `data.prompts_per_step` pairs (or judged responses), computes log-probs of the reference and of the current
policy if the loss needs them, and makes one optimizer step.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from engine_core.algorithms.objectives import resolve_loss
from engine_core.contracts.runtime import Role
from engine_core.errors import ConfigError
from engine_core.train.models import table_length
from engine_core.train.run import TrainingRun
from engine_core.train.source_rows import evaluated, rows_of
from engine_core.types import Batch, LossCall
from engine_plugin_trainers.algorithms import preference_columns as columns
from engine_plugin_trainers.data.preferences import Judged, Pair
from engine_plugin_trainers.data.sources import PairSource
from engine_plugin_trainers.options import check_offered

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.config.evaluation import HeldOut
    from engine_core.config.models import DataConfig
    from engine_core.specs import PairLoss
    from engine_plugin_trainers.options import DPOOptions

Item = TypeVar("Item", Pair, Judged)


class PreferenceRun(TrainingRun, Generic[Item]):
    """A base of trainers whose step is one update over a mini-batch of preferences.

    A subclass provides the source, packs items into a batch, and defines the loss and the columns that it reads.
    """

    role = "actor"  # role of the model that learns

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return False

    @abc.abstractmethod
    def source_of(self, split: str, rows: Any = None, data: DataConfig | None = None) -> Any:
        """Open the rows of a split as items; ``data`` replaces ``[data]``."""

    @abc.abstractmethod
    def batch(self, items: Sequence[Item]) -> Batch:
        """Pack items into a batch with their weights."""

    def annotate(self, batch: Batch, training: bool) -> tuple[Batch, dict[str, float]]:
        """Add columns that need a model or the whole mini-batch; return the batch and metrics."""
        return self.with_reference(batch), {}

    @abc.abstractmethod
    def loss_call(self) -> LossCall:
        """Return the name of the objective and its parameters."""

    def roles(self, training: bool) -> dict[str, Role]:
        """Return the model that learns and, if the loss needs it, the reference."""
        ref = {"ref": Role("train", trainable=False)}
        learns = {self.role: Role("train", trainable=training)}
        return learns | (ref if self.needs_reference else {})

    def make_source(self) -> Any:
        """Open the training split."""
        return self.source_of("train", rows_of(self))

    def step(self, step: int) -> dict[str, float]:
        """Take a mini-batch, annotate it, and make one update."""
        batch = self.batch(self.source.take(self.config_now.data.prompts_per_step))
        with self.phase("log_probs"):
            batch, noted = self.annotate(batch, training=True)
        with self.phase("train"):
            metrics = self.learn(batch, self.loss_call())
        return metrics | noted | {"tokens/total": float(batch.num_tokens)}

    def evaluate(self, out: Path | None = None) -> dict[str, float]:
        """Return ``eval/...`` metrics: the loss and its metrics on each held-out set as one mini-batch."""
        self.setup()
        metrics: dict[str, float] = {}
        for held_out in evaluated(self):
            found = self._evaluated(self._items(held_out))
            metrics |= {held_out.prefix + name.removeprefix("actor/"): value for name, value in found.items()}
        return metrics

    def _items(self, held_out: HeldOut) -> list[Item]:
        """Return the items of a held-out set; they are read once."""
        kept: dict[str, list[Item]] = self.__dict__.setdefault("_held_out_items", {})
        if held_out.name not in kept:
            rows = rows_of(self, held_out)
            source = self.source_of("validation", rows, held_out.data(self.config))
            kept[held_out.name] = source.all(held_out.max_prompts)
            source.close()
        return kept[held_out.name]

    def _evaluated(self, items: Sequence[Item]) -> dict[str, float]:
        """Return the loss and its metrics on these items, without gradient."""
        batch, noted = self.annotate(self.batch(items), training=False)
        call: LossCall = self.loss_call()
        names = (*call.outputs, *call.watched)
        outputs = self.groups[self.role].call("infer", batch, outputs=names).result()
        loss, metrics = resolve_loss(call, self.plugins)(outputs, batch)
        return {name: float(value) for name, value in metrics.items()} | noted | {"loss": float(loss)}

    def with_reference(self, batch: Batch) -> Batch:
        """Add ``ref_log_probs`` [T] if the loss compares with a reference."""
        if not self.needs_reference:
            return batch
        return batch.with_columns(tokens={"ref_log_probs": self.reference_log_probs(batch)})

    def reference_log_probs(self, batch: Batch) -> torch.Tensor:
        """Return log-probs [T] of the reference model."""
        return self.groups["ref"].call("infer", batch, outputs=("log_probs",)).result()["log_probs"]

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Return log-probs [T] of the current policy."""
        return self.groups[self.role].call("infer", batch, outputs=("log_probs",)).result()["log_probs"]


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


class DPOTrainer(PreferenceRun[Pair]):
    """A trainer that learns which of two responses is better: DPO and its variants, ORPO, SimPO and CPO."""

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
        self.mean_reward, self.pairs_seen = 0.0, 0  # over all pairs so far, for `bco_pair`

    @functools.cached_property
    def spec(self) -> PairLoss:
        """Declaration of the pair loss."""
        return cast("PairLoss", self.plugins.spec("pair_losses", self.config.options.loss))

    @property
    def options(self) -> DPOOptions:
        """Options of ``[dpo]`` at this step."""
        options: DPOOptions = self.config_now.options
        return options.of(self.spec)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.options.needs_reference

    def source_of(self, split: str, rows: Any = None, data: DataConfig | None = None) -> PairSource:
        """Open the rows of a split as pairs."""
        config, limit, held = self.config, self.options.max_tokens, table_length(self)
        return PairSource(
            data or config.data, self.tokenizer, limit, "dpo", config.run.seed, split, rows, held
        )

    def batch(self, items: Sequence[Pair]) -> Batch:
        """Pack pairs into a batch."""
        return pair_batch(items)

    def annotate(self, batch: Batch, training: bool) -> tuple[Batch, dict[str, float]]:
        """Add reference log-probs, LD-DPO's tail weights, and the statistic of the mini-batch that the loss reads."""
        batch = self.with_reference(batch)
        if self.options.ld_alpha is not None:
            batch = batch.with_columns(
                tokens={"tail_weights": columns.tail_weights(batch, self.options.ld_alpha)}
            )
        statistic = self.options.traits.statistic
        if not statistic:
            return batch, {}
        ratio = columns.log_ratios(self.log_probs(batch), batch, self.options.normalises)  # [B]
        better, worse = columns.sides(batch)
        if statistic == "matching":  # pairs are formed again; accuracy is that of the data's pairs
            right = float((ratio[better] > ratio[worse]).double().mean())
            return columns.rank_matched(batch, ratio), {"rewards/accuracy": right}
        if statistic == "mean":
            return self._with_mean_reward(batch, self.options.beta * ratio, training)
        reference = torch.zeros(len(better))
        if self.needs_reference:
            of_reference = columns.weighed(batch["ref_log_probs"], batch)
            logps = columns.response_log_probs(of_reference, batch, self.options.normalises)
            reference = logps[better] - logps[worse]
        shift = columns.order_shift(ratio[better] - ratio[worse] + reference, reference)
        return batch.with_columns(sequences={"shift": shift.repeat_interleave(2)}), {}

    def _with_mean_reward(
        self, batch: Batch, rewards: torch.Tensor, training: bool
    ) -> tuple[Batch, dict[str, float]]:
        """Add BCO's delta as ``shift`` [B]: the mean of all rewards so far, this step included."""
        if training:
            count = len(batch) // 2
            self.pairs_seen += count
            self.mean_reward += (float(rewards.double().mean()) - self.mean_reward) * count / self.pairs_seen
        shift = torch.full((len(batch),), self.mean_reward)
        return batch.with_columns(sequences={"shift": shift}), {"rewards/running_mean": self.mean_reward}

    def loss_call(self) -> LossCall:
        """Return the objective ``preference`` with the options that it reads."""
        options = self.options
        names = (
            "loss",
            "beta",
            "f_divergence",
            "f_alpha",
            "label_smoothing",
            "simpo_gamma",
            "discopop_tau",
            "wpo",
        )
        parameters = {name: getattr(options, name) for name in names}
        parameters |= {"normalise": options.normalises, "sft_coef": options.nll_weight}
        return LossCall("preference", parameters, watched=("sum_pi_squared",) if options.wpo else ())

    def state(self) -> dict[str, Any]:
        """Return the running mean of rewards."""
        return {"mean_reward": self.mean_reward, "pairs_seen": self.pairs_seen}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Restore the running mean of rewards."""
        self.mean_reward, self.pairs_seen = state["mean_reward"], state["pairs_seen"]
