"""A scoring thread: it scores complete groups while others are sampled and the policy is updated.

consumes: complete groups; waits for: groups, and its turn with the reward workers; unblocked by: ``put``, ``turn``,
``close``; produces: ``Group.outcomes``.

Outcomes are counted and summed when a step takes the group (``RewardRunner.known``), so metrics and failure policies
belong to the step. The step itself computes rewards that see all its samples in one call, rewards of a model, and
rewards that run in the controller's process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine_core.timeline import Clock

if TYPE_CHECKING:
    from engine_core.rewards import RewardRunner
    from engine_plugin_trainers.ahead import Group


class ScoringThread:
    """A thread that scores groups as soon as they are complete.

    Args:
        rewards: the run's rewards, shared with the holder of ``turn``.
        scored: called in the thread with each list of scored groups.
        clock: source of time and threads.
    """

    def __init__(
        self, rewards: RewardRunner, scored: Callable[[Sequence[Group]], None], clock: Clock | None = None
    ) -> None:
        self.rewards, self.scored, self.clock = rewards, scored, clock or Clock()
        self.turn = self.clock.condition()  # its holder has the exclusive use of the reward workers
        self._changed = self.clock.condition()
        self._work: deque[Group] = deque()
        self._closing = False
        self._error: BaseException | None = None
        self._thread = self.clock.thread(self._run, "scoring")
        self._thread.start()

    def put(self, group: Group) -> None:
        """Queue a complete group for scoring."""
        with self._changed:
            self._work.append(group)
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error that ended the thread, if it has ended.

        Raises:
            BaseException: that error.
        """
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread after the groups that it is scoring."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # -- in the thread ------------------------------------------------------

    def _run(self) -> None:
        try:
            while groups := self._waiting():
                start = self.clock.now()
                self._score(groups)
                for group in groups:
                    group.scoring_seconds = (self.clock.now() - start) / len(groups)
                self.scored(groups)
        except BaseException as error:  # `check` raises it in the caller
            self._error = error

    def _waiting(self) -> list[Group]:
        """Wait for groups and return all that are queued; [] when the thread is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._work or self._closing)
            found = [] if self._closing else list(self._work)
            self._work.clear()
        return found

    def _score(self, groups: Sequence[Group]) -> None:
        """Compute the outcomes of these groups in one call."""
        rollouts = [rollout for group in groups for rollout in group.in_order()]
        with self.turn:
            found = self.rewards.outcomes(rollouts)
        start = 0
        for group in groups:
            end = start + len(group.requests)
            group.outcomes = {name: outcomes[start:end] for name, outcomes in found.items()}
            start = end
