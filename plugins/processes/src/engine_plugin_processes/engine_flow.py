"""The engine's side of a flow: sample until a command arrives, and send a group when it has nothing in flight."""

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
    """A buffer that holds rollouts until their group has no request in flight on this sampler.

    Args:
        requests: all requests in flight on this sampler.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        # groups of two steps may share prompt and number; only the ids, `STEP:GROUP:INDEX`, differ
        self._of: dict[str, Lot] = {
            r.id: (r.prompt.id, r.group_id, r.id.rpartition(":")[0]) for r in requests
        }
        self._left = Counter(self._of.values())
        self._held: dict[Lot, list[Rollout]] = {}

    def finished(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Add finished rollouts; return those of groups that have nothing left in flight."""
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
        """Remove and return the held rollouts of groups that still have requests in flight."""
        held, self._held = self._held, {}
        return [rollout for lot in held.values() for rollout in lot]


def flow(
    engine: RolloutEngine, requests: Sequence[Request], dropped: Sequence[str], goes_on: Callable[[], bool]
) -> Generator[list[Rollout], None, None]:
    """Call ``advance`` repeatedly; yield rollouts when their group is complete, and the rest at the end.

    Args:
        engine: any rollout engine.
        requests: new requests, as in ``advance``.
        dropped: as in ``advance``.
        goes_on: called between two rounds; False ends the flow and leaves unfinished requests in flight.

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
