"""Samplers that go on by themselves: each is told what is new and tells what has finished, and none waits for another.

A command of a flow goes to one sampler. It samples until another command comes, until nothing is left, or for
``MOST_SECONDS``, and tells the rollouts of a group when it has none of them left, or leaves the flow (``engine_flow.GroupBuffer``).
The requests of a group go to one sampler, which reads their prompt once, unless there are fewer groups than samplers. So
the messages of a run are as many as its groups, and some more where responses take longer than a command, and whoever
wants to change something (new weights, a stop) sends a command: the sampler leaves the flow for it between two steps of
its engine.

consumes: requests, of ``go``; waits for: nothing; unblocked by: answers; produces: rollouts for ``tell``, once each, and
``changed`` when a sampler rests or one has failed, both in threads that read answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_plugin_processes.worker_pool import Reply, message_to

if TYPE_CHECKING:
    from engine_core.types import Request, Rollout
    from engine_plugin_processes.codec import Texts
    from engine_plugin_processes.worker_group import RemoteWorkerGroup

MOST_SECONDS = 10.0  # of one command, so that a sampler that hangs is found
SHARE_OF_DEADLINE = 0.25  # the most of the time that a command may take

Tell = Callable[[list["Rollout"]], None]


class Flow:
    """See the module.

    Args:
        group: of samplers, each of one rank, which wait for no other.
        tell: is given rollouts as they finish.
        changed: is called when there is something to look at: ``resting`` or ``error``.
    """

    def __init__(self, group: RemoteWorkerGroup, tell: Tell, changed: Callable[[], None]) -> None:
        self.group, self._tell, self._changed = group, tell, changed
        self.error: BaseException | None = None
        self._open: dict[int, tuple[int, Future[Any]]] = {}  # by slice: its newest command, and the answer
        self._interrupted: set[int] = set()  # commands whose errors nobody wants to know
        self._closed = False
        self._lock = threading.RLock()
        stall = group.crew.stall_seconds
        self._seconds = min(MOST_SECONDS, SHARE_OF_DEADLINE * stall) if stall else MOST_SECONDS

    @property
    def resting(self) -> bool:
        """Return whether a sampler has requests and no command of the flow; ``go`` makes it continue."""
        return bool(self._resting())

    def go(self, requests: Sequence[Request] = (), dropped: Iterable[str] = ()) -> None:
        """Have these sampled, forget those, and have all go on that rest."""
        group = self.group
        group.before(group.role, "advance")
        dropped = set(dropped)
        forgotten = group.running.forget(dropped)
        shares = self._shares(requests, dropped)
        there = self._there()
        asked = {at for at in {*shares, *forgotten, *self._resting()} if at in there}
        same: dict[str, Any] | None = None  # what all are told that have nothing new
        texts: Texts = {}  # a group's requests go to several samplers
        for at in sorted(asked):
            if at in shares or at in forgotten:
                self._send(at, {"requests": shares.get(at, []), "dropped": forgotten.get(at, [])}, texts)
            else:
                same = same or {"requests": [], "dropped": []}
                self._send(at, same, texts)

    def interrupt(self) -> None:
        """Abandon the commands in hand, also in the middle of a step: rollouts that finish in it may be lost."""
        with self._lock:
            self._interrupted |= {number for number, _ in self._open.values()}
            left = [reply for _, reply in self._open.values()]
        for reply in left:
            if isinstance(reply, Reply):
                reply.give_up()

    def close(self) -> None:
        """Abandon the commands in hand, and ignore what still comes of them."""
        self._closed = True
        self.interrupt()

    def _resting(self) -> set[int]:
        """Return the slices that have something to sample and no command."""
        with self._lock:
            return {
                at for at, count in enumerate(self.group.running.under_way) if count and at not in self._open
            }

    def _shares(self, requests: Sequence[Request], dropped: set[str]) -> dict[int, list[Request]]:
        """What samplers are asked anew, those that are."""
        return given(self.group.running.share(requests, whole_groups=True)) if requests else {}

    def _there(self) -> Collection[int]:
        """Numbers of the slices that can be told something."""
        return range(len(self.group.running.under_way))

    def _leader(self, at: int) -> int:
        return self.group.slices[at].leader

    def _goes_on_without(self, error: BaseException) -> bool:
        """Whether it is the loss of a sampler that the others make up for."""
        return False

    def _send(self, at: int, plain: dict[str, Any], texts: Texts) -> None:
        group, number = self.group, self.group.crew.next_number()
        message = message_to(number, "flow", texts, role=group.role, seconds=self._seconds, **plain)
        rank = self._leader(at)
        with self._lock:  # an answer that comes at once waits until it is known
            reply = group.crew.send(
                {rank: message}, (group.role, "advance"), number, interruptible=True, on_part=self._part
            )
            self._open[at] = number, reply
        reply.add_done_callback(partial(self._answered, at, number))

    def _part(self, rollouts: list[Rollout]) -> None:
        try:
            self.group.running.settle(rollouts)
            self._tell(rollouts)
        except BaseException as error:  # of whoever is told; the thread that reads goes on
            self._failed(error)

    def _answered(self, at: int, number: int, reply: Future[Any]) -> None:
        error = reply.exception()
        with self._lock:
            if self._closed:
                return
            newest = self._open[at][0] == number  # else it was sent another command since
            if newest:
                del self._open[at]
            interrupted = number in self._interrupted
            self._interrupted.discard(number)
        if error is not None and not interrupted and not self._goes_on_without(error):
            self._failed(error)
        elif error is not None or newest:
            self._changed()

    def _failed(self, error: BaseException) -> None:
        self.error = self.error or error
        self._changed()


def given(shares: Sequence[list[Request]]) -> dict[int, list[Request]]:
    """Those that have something, by slice."""
    return {at: share for at, share in enumerate(shares) if share}
