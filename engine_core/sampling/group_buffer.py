"""What a sampler that goes on by itself tells together: the responses of one prompt, once it has none of them left.

Nobody can use a response before its group is complete, and a message of eight costs its reader an eighth of eight messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_core.types import Request, Rollout

Lot = tuple[str, int, str]
"""Prompt, group, and the request's id up to its last part, of requests that are told together."""


class GroupBuffer:
    """The requests that one sampler has under way, by prompt and group.

    Args:
        requests: all of them.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        # groups of two steps may share prompt and number, and differ in `STEP:GROUP:INDEX` alone
        self._of: dict[str, Lot] = {
            r.id: (r.prompt.id, r.group_id, r.id.rpartition(":")[0]) for r in requests
        }
        self._left = Counter(self._of.values())
        self._held: dict[Lot, list[Rollout]] = {}

    def finished(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """These are done: those to be told now, each with what was held of its lot."""
        complete: list[Rollout] = []
        for rollout in rollouts:
            lot = self._of[rollout.request_id]
            held = self._held.setdefault(lot, [])
            held.append(rollout)
            self._left[lot] -= 1
            if not self._left[lot]:
                complete += self._held.pop(lot)
        return complete

    def rest(self) -> list[Rollout]:
        """What is held: of lots with something left."""
        held, self._held = self._held, {}
        return [rollout for lot in held.values() for rollout in lot]
