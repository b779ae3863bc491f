"""The base of both kinds of judge: all questions of a round, with failures separate from missing values."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.data.rows import BadRow
from engine_core.rewards.signatures import Outcome
from engine_plugin_rewards.models.classifier import failure, out_of_bounds

if TYPE_CHECKING:
    from engine_plugin_rewards.models.questions import Questions


class AskingReward(abc.ABC):
    """A reward by a language model's answers, which a subclass obtains.

    Args:
        questions: builds the questions to the model.
        limit: longest question in tokens.
    """

    def __init__(self, questions: Questions, limit: int) -> None:
        self.questions, self.limit = questions, limit
        self.names: tuple[str, ...] = questions.names
        self.required: tuple[str, ...] = questions.required
        self.found: dict[str, float] = {}

    @abc.abstractmethod
    def answers(self, asked: Sequence[list[int]]) -> list[Outcome]:
        """Return the outcome of each question; ``found`` then holds their metrics."""

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last round."""
        return self.found

    def score(self, columns: Mapping[str, Sequence[Any]], count: int) -> list[Outcome]:
        """Return an outcome for each sample; its value is None if the row lacks what the question names."""
        outcomes = [Outcome(None)] * count
        asked: dict[int, list[int]] = {}
        for i in range(count):
            text = self.questions.text({name: values[i] for name, values in columns.items()})
            if text is None:
                continue
            try:
                ids = self.questions.token_ids(text)
            except BadRow as error:
                outcomes[i] = failure(str(error))
                continue
            if 0 < len(ids) <= self.limit:
                asked[i] = ids
            else:
                outcomes[i] = failure(out_of_bounds(len(ids), self.limit))
        self.found = {}
        for i, outcome in zip(asked, self.answers(list(asked.values())) if asked else (), strict=True):
            outcomes[i] = outcome
        return outcomes
