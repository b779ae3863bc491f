"""Rewards in worker processes that are killed and replaced when a sample takes too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine_plugin_rewards.worker_pool.early import EarlyScoring
from engine_plugin_rewards.worker_pool.pool import Pool, wait

if TYPE_CHECKING:
    from engine_core.rewards.models import OnFailure
    from engine_core.rewards.signatures import Outcome

POLL_SECONDS = 0.25  # until a death that closes no connection is detected


class RewardWorkers:
    """The part ``reward_workers``, as ``engine_core.contracts.parts.RewardWorkers`` specifies."""

    pool = Pool
    early = EarlyScoring

    def start(self, pools: Sequence[Pool]) -> None:
        """Start the missing workers of all pools at once and wait until they are ready.

        Raises:
            EngineError: a reward does not load; the workers of all pools are ended.
        """
        try:
            _tend_while(lambda pool: pool.starting, pools, _unexpected)
        except BaseException:
            for pool in pools:
                pool.close()
            raise

    def drive(self, pools: Sequence[Pool], on_failure: OnFailure) -> None:
        """Run the workers until every sample of every pool has its outcome.

        Args:
            pools: after ``begin``.
            on_failure: called with each failed sample as it fails; an error that it raises ends the work and is raised
                here. The pools can be used again afterwards.
        """
        try:
            _tend_while(lambda pool: pool.pending, pools, on_failure)
        except BaseException:
            for pool in pools:
                pool.abandon()
            raise


def _tend_while(unfinished: Callable[[Pool], bool], pools: Sequence[Pool], on_failure: OnFailure) -> None:
    while any(map(unfinished, pools)):
        for pool in pools:
            pool.tend(on_failure)
        if any(map(unfinished, pools)):  # otherwise no message would come
            wait(pools, POLL_SECONDS)


def _unexpected(reward: str, position: int, outcome: Outcome) -> None:
    raise AssertionError(f"no sample was given to '{reward}' at position {position}")


REWARD_WORKERS = RewardWorkers()
