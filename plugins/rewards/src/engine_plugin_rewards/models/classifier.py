"""The base of all rewards by a model, and ``[reward.model]``: the score of a sequence classifier with one label."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine_core.data.rows import BadRow
from engine_core.errors import DataError
from engine_core.rewards.signatures import Outcome
from engine_core.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from engine_plugin_rewards.models.sequences import Sequences

Infer = Callable[[Batch, tuple[str, ...]], Mapping[str, "Tensor"]]


class TokenReward(abc.ABC):
    """A reward by a model that reads each sample as a sequence of tokens.

    Args:
        limit: longest sequence in tokens.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.found: dict[str, float] = {}

    @abc.abstractmethod
    def tokens(self, sample: Mapping[str, Any]) -> list[int] | None:
        """Return the token ids of a sample; None if the row lacks what the reward needs.

        Raises:
            BadRow: the template or the tokenizer refuses the sample.
            DataError: the model cannot read it.
        """

    @abc.abstractmethod
    def answers(self, asked: Sequence[list[int]]) -> list[Outcome]:
        """Return the outcome of each sequence; ``found`` then holds their metrics."""

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last round."""
        return self.found

    def score(self, columns: Mapping[str, Sequence[Any]], count: int) -> list[Outcome]:
        """Return an outcome for each sample; its value is None if the reward does not apply.

        Args:
            columns: ``names``, each of ``count`` entries; those that the data lacks are left out.
            count: samples.
        """
        outcomes = [Outcome(None)] * count
        asked: dict[int, list[int]] = {}
        for i in range(count):
            try:
                ids = self.tokens({name: values[i] for name, values in columns.items()})
            except (BadRow, DataError) as error:
                outcomes[i] = failure(str(error))
                continue
            if ids is not None and 0 < len(ids) <= self.limit:
                asked[i] = ids
            elif ids is not None:
                outcomes[i] = failure(
                    f"it has {len(ids)} tokens, and the reward's model takes 1 to {self.limit} (max_tokens)"
                )
        self.found = {}
        for i, outcome in zip(asked, self.answers(list(asked.values())) if asked else (), strict=True):
            outcomes[i] = outcome
        return outcomes


class ClassifierReward(TokenReward):
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
        super().__init__(limit)
        self.sequences, self.infer, self.reuse_token_ids = sequences, infer, reuse_token_ids

    def tokens(self, sample: Mapping[str, Any]) -> list[int]:
        """Return the sampled tokens, or those of the texts."""
        messages = sample.get("messages")
        if self.reuse_token_ids:
            return self.sequences.from_tokens(sample["token_ids"], messages is not None)
        return self.sequences.from_text(sample["prompts"], messages, sample["completions"])

    def answers(self, asked: Sequence[list[int]]) -> list[Outcome]:
        """Return the score of each sequence as a float32 number."""
        (scores,) = infer_last(self.infer, asked, ("scores",))
        return [
            Outcome(score) if math.isfinite(score) else failure(f"the reward model gave {score}")
            for score in scores.tolist()
        ]


def infer_last(
    infer: Infer, sequences: Sequence[Sequence[int]], outputs: tuple[str, ...], **constants: Tensor
) -> list[Tensor]:
    """Return outputs of a train engine at the last token of each sequence, [N] or [N, K].

    Args:
        infer: of the engine.
        sequences: token ids.
        outputs: their names.
        constants: columns that are the same at every token, [K].
    """
    batch = Batch(
        token_ids=torch.tensor([token for ids in sequences for token in ids], dtype=torch.int64),
        lengths=torch.tensor([len(ids) for ids in sequences], dtype=torch.int64),
    )
    last = batch.offsets[1:] - 1
    mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
    mask[last] = True
    columns = {name: value.expand(batch.num_tokens, -1) for name, value in constants.items()}
    found = infer(batch.with_columns({"loss_mask": mask, **columns}), outputs)
    return [found[name][last] for name in outputs]


def failure(message: str) -> Outcome:
    """Return the outcome of a sample without a value; the reward's ``on_error`` decides what follows."""
    return Outcome(failure="error", message=message.rstrip("."))
