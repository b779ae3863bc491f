"""The queue of groups that are sampled ahead of the policy, and the rule for what a step may learn from.

A step learns from P groups, which are sampled at most ``max_staleness`` = S policy versions ahead. Step s learns with
the weights of version s - 1 and ends with version s. So a token that was sampled with version v has the staleness
(s - 1) - v when step s learns from it.

**The rule.** A group that is admitted in step s must be taken by step ``due = s + S``. While step s still has to take
k groups, groups are admitted until k + S * P are queued. A step takes ready groups in the order of admission. It takes
them only if all remaining groups can still be taken in time: the remaining group at place j = 0, 1, ... of the queue
has ``due_j >= s + 1 + j // P`` (*).

**No token that is learned from is older than S versions.** Proof:

1. Taking the first k groups of the queue always satisfies (*). If (*) held after step s - 1, then
   ``due_j >= s + j // P`` holds at the beginning of step s for the groups that were queued. A group that is admitted
   now has a place j < k + S * P. After k >= P other groups are taken its place is below S * P, and
   ``s + 1 + (S * P - 1) // P = s + S = due``. Taking the first k groups moves the others k >= P places up, hence
   ``due_j >= s + (j + P) // P = s + 1 + j // P``. A later round of the same step takes more groups, which only moves
   the others further up. So a step that waits for the first k groups to be ready never waits forever.
2. By (*) with j = 0, no group remains in the queue after the step in which it is due.
3. A group that is admitted in step a has no token of a version below a - 1, because the sampler already had version
   a - 1. It is taken in a step s <= a + S. So its staleness is at most (s - 1) - (a - 1) <= S. Steps that do not change
   the policy (a critic's warm-up) reduce the staleness.

With S = 0 a step admits exactly the groups that it takes: the synchronous loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_core.rewards.signatures import Outcome
    from engine_core.types import Prompt, Request, Rollout


@dataclass(slots=True, eq=False)
class Group:
    """A prompt and those of its G responses that have finished.

    Example: the third prompt of a run with P = 2 is group number 2; its responses are ``2:0:0``, ``2:0:1``, ...
    """

    number: int  # index in the run, from 0, in the order of the data
    prompt: Prompt
    due: int = 0  # the last step that may learn from the group
    requests: Sequence[Request] = ()
    rollouts: dict[str, Rollout] = field(default_factory=dict)  # finished responses, by request id
    outcomes: dict[str, list[Outcome]] | None = None  # of the rewards that are already computed, by reward
    scoring_seconds: float = 0.0  # time that these took
    ready: bool = False
    as_json: dict[str, Any] | None = None  # number and prompt, for checkpoints; built once

    @property
    def complete(self) -> bool:
        """Whether all responses have finished."""
        return len(self.rollouts) == len(self.requests) > 0

    def in_order(self) -> list[Rollout]:
        """Return the responses of a complete group in the order of its requests."""
        return [self.rollouts[request.id] for request in self.requests]


class AheadQueue:
    """The groups that are admitted and not yet taken, in the order of the data.

    The module's docstring states the rule of admission and proves its bound.

    Args:
        prompts_per_step: P.
        max_staleness: S.
        in_order: take groups in the order of the data; otherwise a ready group may overtake one that is not ready.
    """

    def __init__(self, prompts_per_step: int, max_staleness: int, in_order: bool) -> None:
        self.prompts_per_step, self.max_staleness, self.in_order = prompts_per_step, max_staleness, in_order
        self.groups: list[Group] = []
        self._awaited: Group | None = None  # the last group that a step had to wait for
        self.overtaken = 0  # times that a later group was taken before an earlier one, since the start

    def room(self, needed: int, left: int) -> int:
        """Return how many groups may be admitted now.

        Args:
            needed: groups that this step still has to take (k).
            left: groups that later steps will take; more are not admitted.
        """
        return max(needed + min(self.max_staleness * self.prompts_per_step, left) - len(self.groups), 0)

    def admit(self, group: Group, step: int) -> None:
        """Admit a group in ``step``."""
        group.due = step + self.max_staleness
        self.groups.append(group)

    def take(self, step: int, count: int) -> list[Group] | None:
        """Return the groups that ``step`` learns from, in the order of the data; None if too few are ready."""
        # a quick check first, because every group that becomes ready calls this method
        awaited = self._awaited
        if awaited is not None and awaited.due <= step and not awaited.ready:
            return None
        first = self.groups[:count]
        # ``due`` ascends, so no group after these is due
        due = itertools.takewhile(lambda group: group.due <= step, first)
        self._awaited = next((group for group in (first if self.in_order else due) if not group.ready), None)
        if self._awaited is not None:
            return None
        chosen = first if self.in_order else [group for group in self.groups if group.ready][:count]
        rest = self._without(chosen)
        in_time = all(g.due >= step + 1 + j // self.prompts_per_step for j, g in enumerate(rest))
        if len(chosen) < count or not all(group.ready for group in chosen) or not in_time:
            return None
        self.overtaken += len(self._without(chosen, first))
        self.groups = rest
        return chosen

    def _without(self, chosen: Sequence[Group], among: Sequence[Group] | None = None) -> list[Group]:
        gone = {group.number for group in chosen}
        return [group for group in (self.groups if among is None else among) if group.number not in gone]
