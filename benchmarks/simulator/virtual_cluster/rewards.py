"""Rewards of a simulation: the project's ``RewardRunner``, with workers that take virtual time."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.config.rewards import RewardConfig
from engine_core.rewards import RewardRunner
from engine_core.rewards.runner import Scorer
from engine_core.rewards.signatures import Outcome, Signature
from engine_plugin_rewards.worker_pool.pool import Pool

if TYPE_CHECKING:
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.rewards.models import OnFailure
    from virtual_cluster.virtual_clock import VirtualClock

NAME = "simulated"


class SimulatedPool(Pool):
    """A pool of the workers of one reward that take ``seconds`` for each sample, ``size`` samples at a time."""

    def __init__(self, clock: VirtualClock, size: int, seconds: float) -> None:
        super().__init__(NAME, {"timeout": 1.0}, size)
        self.clock, self.seconds = clock, seconds
        self.signature = Signature(False, False, False, ("completions",), ("completions",), False)
        self._random = random.Random(0)

    @property
    def starting(self) -> bool:
        """Whether workers are missing: never."""
        return False

    @property
    def pending(self) -> bool:
        """Whether samples are unfinished: never."""
        return False

    def begin(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        """Let the virtual time of ``count`` samples pass and give each a random outcome."""
        self.clock.sleep(self.seconds * -(-count // self.size))
        self.outcomes = [Outcome(self._random.random()) for _ in range(count)]

    def tend(self, on_failure: OnFailure) -> None:
        """Do nothing: no work is left after ``begin``."""


class SimulatedRewards(RewardRunner):
    """A runner of one simulated reward that accepts any subset of the samples."""

    def __init__(
        self, plugins: PluginSet, tokenizer: Any, clock: VirtualClock, workers: int, seconds: float
    ) -> None:
        super().__init__([], plugins, tokenizer)
        self.pools = [SimulatedPool(clock, workers, seconds)]
        self.scorers = [Scorer(RewardConfig(name=NAME), self.pools[0])]

    def early(self, *args: Any) -> None:
        """Return None: ``EarlyScoring`` would use a real thread, which cannot take turns with sampling."""

    def close(self) -> None:
        """Do nothing."""
