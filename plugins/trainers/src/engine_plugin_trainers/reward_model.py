"""Reward models: a score for each response, learned from pairs of a better and a worse response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine_core.types import Batch, LossCall
from engine_plugin_trainers.preference import PreferenceRun, pair_batch

if TYPE_CHECKING:
    from engine_plugin_trainers.data.preferences import Pair
    from engine_plugin_trainers.options import RewardModelOptions


class RewardModelTrainer(PreferenceRun):
    """A trainer of Bradley-Terry models with a value head; the score of a sequence is read at its last token."""

    role = table = "reward_model"

    @property
    def options(self) -> RewardModelOptions:
        """Options of ``[reward_model]`` at this step."""
        options: RewardModelOptions = self.config_now.options
        return options

    def start(self) -> None:
        """Register the reward model as the actor too."""
        self.groups["actor"] = self.groups[self.role]  # `[actor]` configures it, and the actor is exported

    def batch(self, items: Sequence[Pair]) -> Batch:
        """Pack pairs into a batch whose ``loss_mask`` [T] marks the last token of each sequence."""
        batch = pair_batch(items)
        last = torch.zeros(batch.num_tokens, dtype=torch.bool)
        last[batch.offsets[1:] - 1] = True
        share = last.float() / max(len(batch), 1)
        return batch.with_columns(tokens={"loss_mask": last, "weights": share, "token_share": share})

    def loss_call(self) -> LossCall:
        """Return the objective ``reward_model`` over ``scores``."""
        return LossCall("reward_model", {"center_coef": self.options.center_coef}, outputs=("scores",))
