"""Rewards in worker processes that are killed and replaced when a sample takes too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_plugin_rewards.worker_pool.early import EarlyScoring
from engine_plugin_rewards.worker_pool.pool import Pool, drive, start

if TYPE_CHECKING:
    from engine_core.rewards.models import OnFailure


class RewardWorkers:
    """The part ``reward_workers``, as ``engine_core.contracts.parts.RewardWorkers`` specifies."""

    def pool(self, name: str, order: Mapping[str, Any], size: int) -> Pool:
        """Return the workers of one reward; none is started yet."""
        return Pool(name, order, size)

    def start(self, pools: Sequence[Pool]) -> None:
        """Start the workers that do not run yet.

        Raises:
            EngineError: a reward does not load.
        """
        start(pools)

    def drive(self, pools: Sequence[Pool], on_failure: OnFailure) -> None:
        """Keep the workers of all pools busy until each sample has an outcome."""
        drive(pools, on_failure)

    def early(
        self, pools: Sequence[Pool], on_failure: OnFailure, rollouts: list[Any], decode: Callable[..., None]
    ) -> EarlyScoring:
        """Return an object that scores complete groups while others are sampled."""
        return EarlyScoring(pools, on_failure, rollouts, decode)


REWARD_WORKERS = RewardWorkers()
