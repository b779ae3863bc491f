"""Which groups are sampled ahead of the policy, and which of them a step may learn from.

P groups a step, at most ``max_staleness`` = S policy versions ahead. Step s learns with the weights of version
s - 1 and ends with version s, so a token that was sampled with version v has the staleness (s - 1) - v when step s
learns from it.

**The rule.** A group that is admitted in step s must be taken by step ``due = s + S``. Where step s still has to take
k groups, groups are admitted until k + S * P are queued. A step takes groups that are ready, the first admitted
first, and only such that every group behind stays in time: with the rest of the queue at the places j = 0, 1, ...,
``due_j >= s + 1 + j // P`` (*).

**No token that is learned from is older than S versions.** (1) (*) can always be kept: by taking the first k of
the queue. Where (*) held after step s - 1, ``due_j >= s + j // P`` holds at the beginning of step s for the groups
that were queued; one that is admitted now has a place j < k + S * P and, once k >= P others are gone, a place
below S * P: ``s + 1 + (S * P - 1) // P = s + S = due``. Taking the first k moves the others k >= P places up, hence
``due_j >= s + (j + P) // P = s + 1 + j // P``; a later round of the same step, which takes more, only moves them
further. So a step that waits for the first k to be ready never waits in vain. (2) By (*) with j = 0, no group is
left behind in the step in which it is due. (3) A group that is admitted in step a has no token of a version below
a - 1, for the sampler had version a - 1 by then, and is taken in a step s <= a + S: its staleness is at most
(s - 1) - (a - 1) <= S. Steps that do not change the policy (a critic's warm-up) make it less. QED.

With S = 0 a step admits the groups that it takes, all of them and no other: the synchronous loop.
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
    """One prompt and its G responses, as far as they have come.

    Example: the third prompt of a run with P = 2 is group number 2; its responses are ``2:0:0``, ``2:0:1``, ...
    """

    number: int  # of the run, from 0, in the order of the data
    prompt: Prompt
    due: int = 0  # the last step that may learn from it
    requests: Sequence[Request] = ()
    rollouts: dict[str, Rollout] = field(default_factory=dict)  # finished, by request
    outcomes: dict[str, list[Outcome]] | None = None  # of rewards that were worked out already, by reward
    ready: bool = False
    as_json: dict[str, Any] | None = None  # number and prompt, for checkpoints; made once

    @property
    def complete(self) -> bool:
        """Whether all responses are there."""
        return len(self.rollouts) == len(self.requests) > 0

    def in_order(self) -> list[Rollout]:
        """The responses of a complete group, by their place in it."""
        return [self.rollouts[request.id] for request in self.requests]


class AheadQueue:
    """The groups that are admitted and not yet taken, in the order of the data; see the module.

    Args:
        prompts_per_step: P.
        max_staleness: S.
        in_order: take groups in the order of the data; else a group that is ready may overtake one that is not.
    """

    def __init__(self, prompts_per_step: int, max_staleness: int, in_order: bool) -> None:
        self.prompts_per_step, self.max_staleness, self.in_order = prompts_per_step, max_staleness, in_order
        self.groups: list[Group] = []
        self._awaited: Group | None = None  # the last one that a step could not go without
        self.overtaken = 0  # times that a group was passed over for a later one, since the beginning

    def room(self, needed: int, left: int) -> int:
        """How many groups may be admitted now.

        Args:
            needed: groups that this step still has to take (k).
            left: groups that later steps will take, at least: none is admitted for nobody.
        """
        return max(needed + min(self.max_staleness * self.prompts_per_step, left) - len(self.groups), 0)

    def admit(self, group: Group, step: int) -> None:
        """Queue a group in ``step``."""
        group.due = step + self.max_staleness
        self.groups.append(group)

    def take(self, step: int, count: int) -> list[Group] | None:
        """The groups that step ``step`` learns from, in the order of the data; None: wait for more to be ready."""
        awaited = self._awaited  # asked for each group that becomes ready: what mostly holds is seen at once
        if awaited is not None and awaited.due <= step and not awaited.ready:
            return None
        first = self.groups[:count]
        # in ascending order, none behind them
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
