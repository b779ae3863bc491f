"""One ``generate`` over the slices of a group: each slice samples its share; the rest of a lost one goes to the others.

The shares depend only on the requests and the number of slices, and a sampler's answer only on its share. The result
therefore does not depend on the speed of the samplers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine_plugin_processes.split import split_requests

if TYPE_CHECKING:
    from engine_core.types import Request, Rollout
    from engine_plugin_processes.worker_group import RemoteWorkerGroup
    from engine_plugin_processes.worker_pool import Reply


class Generation:
    """The requests of one call, each answered once.

    consumes: answers of slices; waits for: nothing; unblocked by: answers, errors, ``stop``; produces: ``reply``,
    with the rollouts in the order of their requests, or with the first error.

    Args:
        group: group of the slices, at least one of which is present.
        requests: requests with distinct ids.
        on_part: called with rollouts as they finish; they are not in the result. None: all are in the result.
    """

    def __init__(
        self,
        group: RemoteWorkerGroup,
        requests: Sequence[Request],
        on_part: Callable[[list[Rollout]], None] | None = None,
    ) -> None:
        self._group, self._requests, self._on_part = group, requests, on_part
        self._left = {request.id: request for request in requests}  # not answered yet
        self._found: dict[str, Rollout] = {}
        self._open: list[Reply] = []
        self._error: BaseException | None = None
        self._lost = self._stopped = False
        self._lock = threading.RLock()
        self.reply = group.crew.reply(self.stop)
        self._send()

    def stop(self) -> None:
        """Abandon the commands in flight, and send no more."""
        with self._lock:
            self._stopped = True
            for reply in list(self._open):
                reply.give_up()

    def _send(self) -> None:
        """Split the requests that are left over the slices that are present; without any, set the result."""
        with self._lock:
            present = self._group.present
            shares = split_requests(list(self._left.values()), len(present))
            # engines whose ranks wait for each other are all called, even without a request
            asked = [
                each for each in zip(present, shares, strict=True) if each[1] or not self._group.independent
            ]
            self._open = [self._group.generate_on(at, share, self._take) for at, share in asked]
            for reply in list(self._open):
                reply.add_done_callback(self._answered)
            if not asked:
                self._finish()

    def _take(self, rollouts: Sequence[Rollout]) -> None:
        """Take rollouts, with the controller's prompt objects; leave out those of requests that are answered."""
        new = [rollout for rollout in rollouts if rollout.request_id in self._left]
        for rollout in new:
            rollout.prompt = self._left.pop(rollout.request_id).prompt
        if self._on_part is not None:
            self._on_part(new)
        else:
            self._found |= {rollout.request_id: rollout for rollout in new}

    def _answered(self, reply: Any) -> None:
        with self._lock:
            self._open.remove(reply)
            error = reply.exception()
            if error is None:
                try:
                    self._take(reply.result())  # of an engine that does not send parts
                except Exception as problem:  # a callback's error would only be logged
                    error = problem
            if error is not None and self._group.survives(error):
                self._lost = True
            elif error is not None:
                self._error = self._error or error
                self.stop()
            if self._open:
                return
            if self._lost and self._left and not self._stopped and self._group.replacements is not None:
                self._lost = False
                self._group.replacements.reissue(len(self._left))
                self._send()
            else:
                self._finish()

    def _finish(self) -> None:
        if self._error is not None:
            self.reply.set_exception(self._error)
        else:
            self.reply.set_result([self._found[each.id] for each in self._requests if each.id in self._found])
