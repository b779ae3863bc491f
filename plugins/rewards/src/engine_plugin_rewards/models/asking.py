"""What both kinds of judge share: questions to all samples of a round, failures told apart from what does not apply."""

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
    """A reward that a language model is asked for; a subclass gets the answers.

    Args:
        questions: to it.
        limit: longest question in tokens.
    """

    def __init__(self, questions: Questions, limit: int) -> None:
        self.questions, self.limit = questions, limit
        self.names: tuple[str, ...] = questions.names
        self.required: tuple[str, ...] = questions.required
        self.found: dict[str, float] = {}

    @abc.abstractmethod
    def answers(self, asked: Sequence[list[int]]) -> list[Outcome]:
        """The outcome of each question; ``found`` then holds metrics of them."""

    def metrics(self) -> Mapping[str, float]:
        return self.found

    def score(self, columns: Mapping[str, Sequence[Any]], count: int) -> list[Outcome]:
        """An outcome for each sample; None where the row lacks what the question names."""
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
