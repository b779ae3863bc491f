"""Scoring of complete groups while other groups are still sampled.

A thread keeps the workers of the rewards busy until sampling ends; ``RewardRunner.score`` then does the rest. Values,
their order and the metrics are those of scoring at the end: an outcome belongs to its sample, and sums are made once,
over all samples in order. Rewards that see all samples in one call, rewards by a model, and rewards that run in this
process are left to the end.

consumes: complete groups; waits for: messages of the workers, ``POLL_SECONDS`` at most; unblocked by: these, ``seal``,
``cancel``; produces: outcomes in the pools.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine_plugin_rewards.worker_pool.pool import wait

if TYPE_CHECKING:
    from engine_core.rewards.models import OnFailure
    from engine_core.types import Request, Rollout
    from engine_plugin_rewards.worker_pool.pool import Pool

POLL_SECONDS = 0.02  # until a new group is given to idle workers


class EarlyScoring:
    """An early scoring of the groups of one round of sampling.

    Args:
        pools: started pools of rewards that accept any subset of the samples.
        on_failure: called in the thread with each failed sample; an error that it raises ends the scoring, and
            ``take`` or ``seal`` raises it.
        rollouts: a list with a place for each sample, filled here; ``on_failure`` may read it.
        arguments: returns the arguments of a pool's function for rollouts.
    """

    def __init__(
        self, pools: Sequence[Pool], on_failure: OnFailure, rollouts: list[Any], arguments: Any
    ) -> None:
        self.pools, self.on_failure, self.rollouts, self.arguments = pools, on_failure, rollouts, arguments
        self.busy_seconds = 0.0  # during which a worker was busy
        self._places: dict[str, int] = {}
        self._missing: dict[int, int] = {}  # by group
        self._groups: dict[int, list[int]] = {}
        self._error: BaseException | None = None
        self._ended = False
        self._pools = threading.Lock()  # held to use the pools
        for pool in pools:
            pool.expect(len(rollouts))
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def expect(self, requests: Sequence[Request]) -> None:
        """Announce the requests, in the order of the samples."""
        for place, request in enumerate(requests):
            self._places[request.id] = place
            self._missing[request.group_id] = self._missing.get(request.group_id, 0) + 1

    def take(self, rollouts: Sequence[Rollout]) -> None:
        """Accept finished rollouts; groups that they complete are scored.

        Raises:
            EngineError: a reward has failed in a way that ends the run.
        """
        if self._error is not None:
            raise self._error
        for rollout in rollouts:
            place, group = self._places[rollout.request_id], rollout.group_id
            self.rollouts[place] = rollout
            self._groups.setdefault(group, []).append(place)
            self._missing[group] -= 1
            if self._missing[group] == 0:
                self._submit(sorted(self._groups[group]))

    def seal(self) -> None:
        """End the thread after sampling; requests in flight stay with the workers.

        Raises:
            EngineError: a reward has failed in a way that ends the run.
        """
        self._stop()
        if self._error is not None:
            self.cancel()
            raise self._error

    def cancel(self) -> None:
        """End the thread and discard all outcomes."""
        self._stop()
        for pool in self.pools:
            pool.abandon()

    def _stop(self) -> None:
        self._ended = True
        self._thread.join()

    def _submit(self, places: list[int]) -> None:
        group = [self.rollouts[place] for place in places]
        for pool in self.pools:
            columns = self.arguments(pool, group)
            with self._pools:
                pool.submit(places, columns)

    def _run(self) -> None:
        """Keep the workers busy; in the thread."""
        try:
            while not self._ended:
                start = time.perf_counter()
                with self._pools:
                    for pool in self.pools:
                        pool.tend(self.on_failure)
                    busy = any(pool.busy for pool in self.pools)
                wait(self.pools, POLL_SECONDS)
                self.busy_seconds += busy * (time.perf_counter() - start)
        except BaseException as error:  # ``take`` or ``seal`` raises it
            self._error = error
