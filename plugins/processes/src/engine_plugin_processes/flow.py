"""Continuous sampling: each sampler receives new requests and returns finished rollouts independently of the others.

A command of a flow goes to one sampler. The sampler continues until another command arrives, no request is left, or
``MOST_SECONDS`` have passed. It sends rollouts after the engine step in which they finish. The requests of a group go to
one sampler, which reads their prompt once, unless there are fewer groups than samplers. New weights or a stop are sent
as another command: the sampler leaves the flow for it between two steps of its engine.

The unfinished requests of a lost sampler go to the others with the next ``go``. A process that replaces it starts
without requests and gets its share like the others.

consumes: requests from ``go``; waits for: nothing; unblocked by: answers; produces: rollouts for ``tell``, once each,
and ``changed`` when a sampler rests or has failed, both in threads that read answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_core.types import Request, Rollout
    from engine_plugin_processes.worker_group import RemoteWorkerGroup
    from engine_plugin_processes.worker_pool import Reply

MOST_SECONDS = 10.0  # limit of one command, so that a hanging sampler is detected
SHARE_OF_DEADLINE = 0.25  # largest share of the deadline that one command takes


class Flow:
    """A flow of requests to independent samplers and of rollouts back; the module's docstring describes it.

    Args:
        group: samplers of one rank each, none of which waits for another.
        tell: called with rollouts as they finish.
        changed: called when ``resting`` or ``error`` may have changed.
    """

    def __init__(
        self, group: RemoteWorkerGroup, tell: Callable[[list[Rollout]], None], changed: Callable[[], None]
    ) -> None:
        self.group, self._tell, self._changed = group, tell, changed
        self.error: BaseException | None = None
        self._open: dict[int, Reply] = {}  # slice -> answer to its newest command
        self._idle = set(range(len(group.slices)))  # slices without a command
        self._closed = False
        self._lock = threading.RLock()
        stall = group.crew.stall_seconds
        self._seconds = min(MOST_SECONDS, SHARE_OF_DEADLINE * stall) if stall else MOST_SECONDS

    @property
    def resting(self) -> bool:
        """Whether a sampler has requests and no command, or was lost with requests; ``go`` makes the flow continue."""
        return bool(self._resting()) or self.group.lost_some

    def go(self, requests: Sequence[Request] = (), dropped: Iterable[str] = ()) -> None:
        """Send new requests, cancel those in ``dropped``, and resume the samplers that rest."""
        group = self.group
        group.before(group.role, "advance")
        forgotten = group.forget(set(dropped))
        shares = {at: share for at, share in enumerate(group.share(requests)) if share}
        same: dict[str, Any] = {"requests": [], "dropped": []}  # shared by all samplers without a change
        for at in sorted({*shares, *forgotten, *self._resting()}.intersection(group.present)):
            if at in shares or at in forgotten:
                self._send(at, {"requests": shares.get(at, []), "dropped": forgotten.get(at, [])})
            else:
                self._send(at, same)

    def close(self) -> None:
        """Abandon the open commands and ignore their answers."""
        with self._lock:
            self._closed = True
            left = list(self._open.values())
        for reply in left:
            reply.give_up()

    def _resting(self) -> set[int]:
        """Return the slices that have requests and no command."""
        with self._lock:
            return {at for at in self._idle if self.group.running.under_way[at]}

    def _send(self, at: int, plain: dict[str, Any]) -> None:
        group, rank = self.group, self.group.slices[at].leader
        message = {"kind": "flow", "role": group.role, "seconds": self._seconds, **plain}
        with self._lock:  # an immediate answer waits until `_open` has the command
            reply = group.crew.send(
                {rank: message}, (group.role, "advance"), interruptible=True, on_part=self._part
            )
            self._open[at] = reply
            self._idle.discard(at)
        reply.add_done_callback(partial(self._answered, at))

    def _part(self, rollouts: list[Rollout]) -> None:
        try:
            self.group.running.settle(rollouts)
            self._tell(rollouts)
        except BaseException as error:  # raised by `tell`; the reading thread continues
            self._failed(error)

    def _answered(self, at: int, reply: Future[Any]) -> None:
        error = reply.exception()
        with self._lock:
            if self._closed:
                return
            newest = self._open.get(at) is reply  # else the slice has received another command since
            if newest:
                del self._open[at]
                self._idle.add(at)
        if error is not None and not self.group.survives(error):
            self._failed(error)
        elif error is not None or newest:
            self._changed()

    def _failed(self, error: BaseException) -> None:
        self.error = self.error or error
        self._changed()
