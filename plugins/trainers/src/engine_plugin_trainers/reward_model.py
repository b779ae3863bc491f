"""Reward models: a score for each response, learned from which of two is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine_core.train.models import table_length
from engine_core.types import Batch, LossCall
from engine_plugin_trainers.data.preferences import Pair
from engine_plugin_trainers.data.sources import PairSource
from engine_plugin_trainers.preference import PreferenceRun, pair_batch

if TYPE_CHECKING:
    from engine_core.config.models import DataConfig
    from engine_plugin_trainers.options import RewardModelOptions


class RewardModelTrainer(PreferenceRun[Pair]):
    """Bradley-Terry on a model with a value head: the score of a sequence is read at its last token."""

    role = "reward_model"

    @property
    def options(self) -> RewardModelOptions:
        """``[reward_model]``"""
        options: RewardModelOptions = self.config_now.options
        return options

    def start(self) -> None:
        self.groups["actor"] = self.groups[self.role]  # `[actor]` configures it, and it is what is exported

    def source_of(self, split: str, rows: Any = None, data: DataConfig | None = None) -> PairSource:
        config, limit, held = self.config, self.options.max_tokens, table_length(self)
        return PairSource(
            data or config.data, self.tokenizer, limit, self.role, config.run.seed, split, rows, held
        )

    def batch(self, items: Sequence[Pair]) -> Batch:
        batch = pair_batch(items)
        last = torch.zeros(batch.num_tokens, dtype=torch.bool)
        last[batch.offsets[1:] - 1] = True
        share = last.float() / max(len(batch), 1)
        return batch.with_columns(tokens={"loss_mask": last, "weights": share, "token_share": share})

    def loss_call(self) -> LossCall:
        return LossCall("reward_model", {"center_coef": self.options.center_coef}, outputs=("scores",))
