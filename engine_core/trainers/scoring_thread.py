"""Rewards of groups as soon as they are complete, while others are sampled and the policy is updated.

consumes: complete groups; waits for: groups, while there are none, and its turn with the workers of the rewards;
unblocked by: ``put``, ``turn``, ``close``; produces: ``Group.outcomes``.

Outcomes are counted and summed when a step takes the group (``RewardRunner.known``), so that metrics and failure
policies are those of the step. Left to the step are rewards that see all its samples in one call, those of a model,
and those that run in the controller's process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_core.rewards import RewardRunner
    from engine_core.trainers.ahead import Group


class ScoringThread:
    """See the module.

    Args:
        rewards: of the run, shared with whoever holds ``turn``.
        scored: is told of groups that are done, in the thread.
    """

    def __init__(self, rewards: RewardRunner, scored: Callable[[Sequence[Group]], None]) -> None:
        self.rewards, self.scored = rewards, scored
        self.seconds: dict[int, float] = {}  # that each group took, by its number
        self._turn = threading.Lock()
        self._work: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
        self._thread.start()

    def put(self, group: Group) -> None:
        """A group is complete."""
        self._work.put(group)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The workers of the rewards are the caller's."""
        with self._turn:
            yield

    def check(self) -> None:
        """Raise what has ended the thread."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread, when what it is at is done."""
        self._work.put(None)
        self._thread.join()

    # -- in the thread ------------------------------------------------------

    def _run(self) -> None:
        try:
            while groups := self._waiting():
                start = time.perf_counter()
                self._score(groups)
                share = (time.perf_counter() - start) / len(groups)
                self.seconds |= {group.number: share for group in groups}
                self.scored(groups)
        except BaseException as error:  # raised again by whoever waits for groups
            self._error = error

    def _waiting(self) -> list[Group]:
        """All groups that wait, at least one; none: it was the end."""
        found = [self._work.get()]
        while not self._work.empty():
            found.append(self._work.get())
        return [] if None in found else [group for group in found if group is not None]

    def _score(self, groups: Sequence[Group]) -> None:
        rollouts = [rollout for group in groups for rollout in group.in_order()]
        with self._turn:
            found = self.rewards.outcomes(rollouts)
        start = 0
        for group in groups:
            end = start + len(group.requests)
            group.outcomes = {name: outcomes[start:end] for name, outcomes in found.items()}
            start = end
