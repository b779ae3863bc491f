"""Rewards of groups as soon as they are complete, while others are sampled and the policy is updated.

consumes: complete groups; waits for: groups, while there are none, and its turn with the workers of the rewards;
unblocked by: ``put``, ``turn``, ``close``; produces: ``Group.outcomes``.

Outcomes are counted and summed when a step takes the group (``RewardRunner.known``), so that metrics and failure
policies are those of the step. Left to the step are rewards that see all its samples in one call, those of a model,
and those that run in the controller's process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine_core.train.clock import Clock

if TYPE_CHECKING:
    from engine_core.rewards import RewardRunner
    from engine_plugin_trainers.ahead import Group


class ScoringThread:
    """See the module.

    Args:
        rewards: of the run, shared with whoever holds ``turn``.
        scored: is told of groups that are done, in the thread.
        clock: time and threads.
    """

    def __init__(
        self, rewards: RewardRunner, scored: Callable[[Sequence[Group]], None], clock: Clock | None = None
    ) -> None:
        self.rewards, self.scored, self.clock = rewards, scored, clock or Clock()
        self.seconds: dict[int, float] = {}  # that each group took, by its number
        self._turn = self.clock.condition()
        self._changed = self.clock.condition()
        self._work: deque[Group] = deque()
        self._closing = False
        self._error: BaseException | None = None
        self._thread = self.clock.thread(self._run, "scoring")
        self._thread.start()

    def put(self, group: Group) -> None:
        """A group is complete."""
        with self._changed:
            self._work.append(group)
            self._changed.notify_all()

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
                share = (self.clock.now() - start) / len(groups)
                self.seconds |= {group.number: share for group in groups}
                self.scored(groups)
        except BaseException as error:  # raised again by whoever waits for groups
            self._error = error

    def _waiting(self) -> list[Group]:
        """All groups that wait, at least one; none: it was the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._work or self._closing)
            found = [] if self._closing else list(self._work)
            self._work.clear()
        return found

    def _score(self, groups: Sequence[Group]) -> None:
        rollouts = [rollout for group in groups for rollout in group.in_order()]
        with self._turn:
            found = self.rewards.outcomes(rollouts)
        start = 0
        for group in groups:
            end = start + len(group.requests)
            group.outcomes = {name: outcomes[start:end] for name, outcomes in found.items()}
            start = end
