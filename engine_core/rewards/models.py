"""Rewards computed by a model of the run: the interface that the reward runner uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine_core.rewards.signatures import OnFailure, Outcome, Signature


@dataclass(frozen=True)
class Known:
    """Outcomes that were computed before, for ``RewardRunner.score``."""

    outcomes: Mapping[str, Sequence[Outcome]]  # by reward, in the order of the rollouts
    busy_seconds: float  # time that the scoring took


class ModelReward(Protocol):
    """The model side of a reward, which computes its values.

    Attributes:
        names: the columns that it reads, named as the arguments of a reward in plural form.
        required: the columns among them that the data must have.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]

    def score(self, columns: Mapping[str, Sequence[Any]], count: int) -> list[Outcome]:
        """Return an outcome for each of ``count`` samples; an exception ends the run."""

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the last ``score``, means over its samples; each becomes ``reward/NAME/...``."""


class ByModel:
    """A reward by a model, called in the controller with all samples of a round at once, so that they share batches."""

    def __init__(self, name: str, model: ModelReward) -> None:
        self.name, self.model = name, model
        self.signature: Signature | None = Signature(
            per_sample=False,
            asynchronous=False,
            whole_batch=True,
            names=model.names,
            required=model.required,
            all_columns=False,
        )
        self.outcomes: list[Outcome | None] = []
        self.restarts = 0

    def run(self, columns: Mapping[str, Sequence[Any]], count: int, on_failure: OnFailure) -> None:
        """Score all samples; call ``on_failure`` for each failed one."""
        self.outcomes = list(self.model.score(columns, count))
        for position, outcome in enumerate(self.outcomes):
            if outcome is not None and outcome.failure:
                on_failure(self.name, position, outcome)
