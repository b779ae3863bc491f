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
    from engine_plugin_tools.bench.simulator.virtual_clock import VirtualClock

NAME = "simulated"


class SimulatedPool(Pool):
    """The workers of one reward: samples are done in ``seconds`` each, ``size`` at a time."""

    def __init__(self, clock: VirtualClock, size: int, seconds: float) -> None:
        super().__init__(NAME, {"timeout": 1.0}, size)
        self.clock, self.seconds = clock, seconds
        self.signature = Signature(False, False, False, ("completions",), ("completions",), False)
        self._random = random.Random(0)

    @property
    def starting(self) -> bool:
        return False

    @property
    def pending(self) -> bool:
        return False

    def begin(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        self.clock.sleep(self.seconds * -(-count // self.size))
        self.outcomes = [Outcome(self._random.random()) for _ in range(count)]

    def tend(self, on_failure: OnFailure) -> None:
        """Nothing is left to do."""


class SimulatedRewards(RewardRunner):
    """One reward, whose samples may be done in any parts."""

    def __init__(
        self, plugins: PluginSet, tokenizer: Any, clock: VirtualClock, workers: int, seconds: float
    ) -> None:
        super().__init__([], plugins, tokenizer)
        self.pools = [SimulatedPool(clock, workers, seconds)]
        self.scorers = [Scorer(RewardConfig(name=NAME), self.pools[0])]

    def early(self, *args: Any) -> None:
        """Not beside sampling in turn: ``EarlyScoring`` has a thread of the machine's."""

    def close(self) -> None:
        """Nothing to end."""
