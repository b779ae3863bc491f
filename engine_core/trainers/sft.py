"""Supervised fine-tuning on the same train engine: rows in, ``-mean log p(response)`` down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine_core.algorithms.aggregation import with_weights
from engine_core.data import SFTSource
from engine_core.runtime.base import Role
from engine_core.trainers.base import TrainingRun
from engine_core.types import Batch, LossCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.data import Example


class SFTTrainer(TrainingRun):
    """Learn responses token by token; one optimizer step a step, over `data.prompts_per_step` sequences.

    The loss is the mean over all response tokens of the step, whatever the micro-batches.
    """

    def roles(self, training: bool) -> dict[str, Role]:
        return {"actor": Role("train", trainable=training)}

    def make_source(self) -> SFTSource:
        return self._source("train", rows=self.live.get("data"))

    def step(self, step: int) -> dict[str, float]:
        batch = self.batch(self.source.take(self.config_now.data.prompts_per_step))
        with self.phase("train"):
            metrics = self.learn(batch, LossCall("nll"))
        return metrics | {
            "tokens/total": float(batch.num_tokens),
            "tokens/learned": float(batch["loss_mask"].sum()),
        }

    def evaluate(self) -> dict[str, float]:
        """Mean negative log-likelihood of the response tokens of the validation files."""
        self.setup()
        if not hasattr(self, "_examples"):
            source = self._source("validation")
            self._examples = source.all(self.config.eval.max_prompts)
            source.close()
        batch = self.batch(self._examples)
        log_probs = self.groups["actor"].call("infer", batch, outputs=("log_probs",)).result()["log_probs"]
        return {"eval/nll": float(-(log_probs.double() * batch["token_share"]).sum())}

    def batch(self, examples: Sequence[Example]) -> Batch:
        """Examples one after another, with token-mean weights."""
        packed = Batch(
            token_ids=torch.tensor([token for e in examples for token in e.token_ids], dtype=torch.int64),
            lengths=torch.tensor([len(e.token_ids) for e in examples], dtype=torch.int64),
            tokens={"loss_mask": torch.tensor([m for e in examples for m in e.loss_mask], dtype=torch.bool)},
        )
        return with_weights(packed, "token-mean")

    def _source(self, split: str, rows: Any = None) -> SFTSource:
        config = self.config
        return SFTSource(config.data, self.tokenizer, config.options, config.run.seed, split=split, rows=rows)
