"""``[reward.model]``: the score of a sequence classifier with one label, read at one token of each sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine_core.errors import DataError
from engine_core.rewards.signatures import Outcome
from engine_core.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from engine_plugin_rewards.models.sequences import Sequences

Infer = Callable[[Batch, tuple[str, ...]], Mapping[str, "Tensor"]]


class ClassifierReward:
    """A reward that scores all samples of a round in one call of the engine, which plans the micro-batches.

    Args:
        sequences: converts a sample to tokens.
        infer: ``infer`` of the reward model's engine.
        limit: longest sequence in tokens.
        reuse_token_ids: take the sampled tokens, because the tokenizer is the actor's.
    """

    names: tuple[str, ...] = ("prompts", "completions", "messages", "token_ids")
    required: tuple[str, ...] = ("completions",)

    def __init__(self, sequences: Sequences, infer: Infer, limit: int, reuse_token_ids: bool) -> None:
        self.sequences, self.infer, self.limit, self.reuse_token_ids = (
            sequences,
            infer,
            limit,
            reuse_token_ids,
        )

    def score(self, columns: Mapping[str, Sequence[Any]], count: int) -> list[Outcome]:
        """Return an outcome for each sample: its score as a float32 number.

        Args:
            columns: ``names``, each of ``count`` entries; ``messages`` if the data has them.
            count: samples.
        """
        outcomes: list[Outcome | None] = [None] * count
        ids: dict[int, list[int]] = {}
        for i in range(count):
            try:
                ids[i] = self._ids({name: values[i] for name, values in columns.items()})
            except DataError as error:
                outcomes[i] = failure(str(error))
                continue
            if not 0 < len(ids[i]) <= self.limit:
                outcomes[i] = failure(out_of_bounds(len(ids.pop(i)), self.limit))
        for i, score in zip(ids, self._scores(list(ids.values())), strict=True):
            finite = math.isfinite(score)
            outcomes[i] = Outcome(score) if finite else failure(f"the reward model gave {score}")
        return [outcome for outcome in outcomes if outcome is not None]

    def metrics(self) -> Mapping[str, float]:
        """Return no metrics."""
        return {}

    def _ids(self, sample: Mapping[str, Any]) -> list[int]:
        messages = sample.get("messages")
        if self.reuse_token_ids:
            return self.sequences.from_tokens(sample["token_ids"], messages is not None)
        return self.sequences.from_text(sample["prompts"], messages, sample["completions"])

    def _scores(self, sequences: Sequence[list[int]]) -> list[float]:
        if not sequences:
            return []
        batch = batch_of(sequences)
        last = batch.offsets[1:] - 1
        mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
        mask[last] = True
        scores: list[float] = self.infer(batch.with_columns({"loss_mask": mask}), ("scores",))["scores"][
            last
        ].tolist()
        return scores


def batch_of(sequences: Sequence[Sequence[int]]) -> Batch:
    """Return a batch of these sequences of token ids."""
    return Batch(
        token_ids=torch.tensor([token for ids in sequences for token in ids], dtype=torch.int64),
        lengths=torch.tensor([len(ids) for ids in sequences], dtype=torch.int64),
    )


def failure(message: str) -> Outcome:
    """Return the outcome of a sample without a value; the reward's ``on_error`` decides what follows."""
    return Outcome(failure="error", message=message.rstrip("."))


def out_of_bounds(length: int, limit: int) -> str:
    """Return the message for a sample that is too long or empty."""
    return f"it has {length} tokens, and the reward's model takes 1 to {limit} (max_tokens)"
