"""Supervised fine-tuning: minimizes ``-mean log p(response)`` over the rows of the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine_core.algorithms.objectives import with_weights
from engine_core.contracts.runtime import Role
from engine_core.data.rows import open_rows
from engine_core.data.source import Source
from engine_core.train.run import TrainingRun
from engine_core.types import Batch, LossCall
from engine_plugin_trainers.data.examples import Example, ExamplePreparer
from engine_plugin_trainers.models import table_length

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine_core.config.models import DataConfig
    from engine_core.data.rows import Rows
    from engine_plugin_trainers.options import SFTOptions


class SFTTrainer(TrainingRun):
    """A trainer that learns the responses of the data.

    A step is one optimizer step over `data.prompts_per_step` sequences. The loss is the mean over all response tokens
    of the step and does not depend on the micro-batches.
    """

    def roles(self, training: bool) -> dict[str, Role]:
        """Return the actor alone."""
        return {"actor": Role("train", trainable=training)}

    def source_of(self, split: str, data: DataConfig, rows: Any) -> Source[Example]:
        """Open the rows of a split as examples."""
        held, options = table_length(self.text_config), self.config.options
        opened = open_rows(data, split, rows)
        return example_source(opened, data, self.tokenizer, options, self.config.run.seed, split, held)

    def step(self, step: int) -> dict[str, float]:
        """Make one update over the next examples."""
        batch = example_batch(self.source.take(self.config_now.data.prompts_per_step))
        with self.phase("train"):
            metrics = self.learn(batch, LossCall("nll"))
        return metrics | {
            "tokens/total": float(batch.num_tokens),
            "tokens/learned": float(batch["loss_mask"].sum()),
        }

    def evaluate(self, out: Path | None = None) -> dict[str, float]:
        """Return the mean negative log-likelihood of the response tokens of each held-out set."""
        self.setup()
        metrics = {}
        for held_out in self.held_out():
            batch = example_batch(self.held_items(held_out))
            made = self.groups["actor"].call("infer", batch, outputs=("log_probs",)).result()
            nll = -(made["log_probs"].double() * batch["token_share"]).sum()
            metrics[f"{held_out.prefix}nll"] = float(nll)
        return metrics


def example_source(
    rows: Rows,
    data: DataConfig,
    tokenizer: Any,
    options: SFTOptions,
    seed: int,
    split: str = "train",
    held: int | None = None,
    table: str = "sft",
) -> Source[Example]:
    """Return a source of sequences to learn.

    Args:
        rows: the opened rows.
        data: ``[data]``.
        tokenizer: the run's tokenizer.
        options: ``[sft]``, or the same options of another table.
        seed: seed of the order.
        split: first part of every id.
        held: length of the model's position table, in tokens; a longer sequence is over-long too.
        table: name of the option table that has ``max_tokens``, for messages.
    """
    how = options.max_tokens, table, held, options.train_on_prompt
    return Source(ExamplePreparer(rows, tokenizer, data, split, *how), seed)


def example_batch(examples: Sequence[Example]) -> Batch:
    """Pack examples into a batch with token-mean weights."""
    packed = Batch(
        token_ids=torch.tensor([token for e in examples for token in e.token_ids], dtype=torch.int64),
        lengths=torch.tensor([len(e.token_ids) for e in examples], dtype=torch.int64),
        tokens={"loss_mask": torch.tensor([m for e in examples for m in e.loss_mask], dtype=torch.bool)},
    )
    return with_weights(packed, "token-mean")
