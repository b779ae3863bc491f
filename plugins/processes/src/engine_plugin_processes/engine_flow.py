"""A flow at the engine: sample until a command comes, and send the rollouts of a group when it has none left in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_core.contracts.engines import RolloutEngine
    from engine_core.types import Request, Rollout

Lot = tuple[str, int, str]
"""Prompt, group, and the request's id up to its last part: requests whose rollouts are sent together."""


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
        """Take finished rollouts; return those of groups that have nothing left in flight."""
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
        """Return and forget what is held of groups with something left in flight."""
        held, self._held = self._held, {}
        return [rollout for lot in held.values() for rollout in lot]


def flow(
    engine: RolloutEngine, requests: Sequence[Request], dropped: Sequence[str], goes_on: Callable[[], bool]
) -> Generator[list[Rollout], None, None]:
    """As ``advance``, again and again; what has finished once nothing of its ``GroupBuffer`` is left, or this is.

    Args:
        engine: any rollout engine.
        requests: new ones, as in ``advance``.
        dropped: as in ``advance``.
        goes_on: asked between two rounds; False leaves what is unfinished under way.

    Raises:
        PluginError: as ``generate``.
    """
    gone = set(dropped)
    lots = GroupBuffer([request for id, request in engine.running.items() if id not in gone] + list(requests))
    finished = lots.finished(engine.advance(requests, dropped))
    while True:
        if finished:
            yield finished
        if not engine.running or not goes_on():
            break
        finished = lots.finished(engine.advance())
    if held := lots.rest():
        yield held
