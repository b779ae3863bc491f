"""The trainer ``evaluate``, which samples and scores held-out sets and trains nothing.

A model folder is read by the sampler alone, without a train engine. A checkpoint is read by the actor's engine, which
wrote it, and its weights are sent to the sampler.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine_core.contracts.runtime import Role
from engine_core.errors import ConfigError
from engine_core.train.sampled_run import SampledRun

if TYPE_CHECKING:
    from engine_core.types import Rollout


class NoRows:
    """The training rows of a run that trains nothing."""

    def state(self) -> dict[str, Any]:
        """Return no position."""
        return {}

    def all(self) -> NoReturn:
        """Refuse to sample them.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "trainer = 'evaluate' reads no training rows. Sample with: engine eval FILE --out DIR."
        )

    def close(self) -> None:
        """Do nothing."""


class Evaluation(SampledRun):
    """A run that only evaluates: the sets of ``[eval]``, with the rewards of ``[[reward]]``."""

    samples = False
    _from_checkpoint = False
    _began = 0.0  # when the current set was begun, in seconds

    def roles(self, training: bool) -> dict[str, Role]:
        """Return the sampler, and the actor where the weights are not those of the model folder."""
        sampler = {"rollout": Role("rollout")}
        actor = self.config.actor
        if not (self._from_checkpoint or self.builds_model or actor.lora or actor.path):
            return sampler
        return {"actor": Role("train", trainable=training), **sampler}

    def start(self) -> None:
        """Send the actor's weights to the sampler, if there is an actor."""
        if "actor" in self.groups:
            super().start()

    def prepare(self) -> None:
        """Prepare the sampler and the rewards, and read every set before a model is loaded."""
        super().prepare()
        for held_out in self.held_out():
            self.held_items(held_out)

    def make_source(self) -> NoRows:
        """Return no training rows."""
        return NoRows()

    def reward_columns(self) -> set[str]:
        """Return the columns of the held-out sets."""
        columns: set[str] = set()
        for held_out in self.held_out():
            rows, data = self.given.held_out(held_out), held_out.data(self.config)
            with closing(self.source_of("validation", data, rows)) as source:
                columns |= source.columns()
        return columns

    def reward_rows(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return no rows: those of the sets are checked when the sets are read."""
        return ()

    def load_checkpoint(self, path: Path) -> None:
        """Load the actor of a checkpoint of any trainer, and send its weights to the sampler."""
        self._from_checkpoint = True
        super().load_checkpoint(path)

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Send the loaded weights to the sampler; the state of the trainer that wrote the checkpoint is not read."""
        self.version = state.get("version", 0)
        self.push_weights(updated=False)

    def evaluate(self, out: Path | None = None) -> dict[str, float]:
        """Sample and score the sets; see ``SampledRun.evaluate``. ``seconds`` of a set is the time that it took."""
        self.setup()
        self._began = time.monotonic()
        return super().evaluate(out)

    def measured(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Return the time in which the set was sampled and scored."""
        began, self._began = self._began, time.monotonic()
        return {"seconds": self._began - began}

    def train(self, resume: Any = None) -> NoReturn:
        """Refuse to train.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "trainer = 'evaluate' trains nothing. Measure with: engine eval FILE. To train, choose another trainer."
        )

    def step(self, step: int) -> NoReturn:
        """Refuse to train; see ``train``."""
        self.train()

    def derived(self) -> NoReturn:
        """Refuse to describe the training; see ``train``."""
        self.train()
