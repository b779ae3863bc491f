"""The portions of one ``generate``, each sent to the next free sampler.

The contents of a portion depend only on the requests, and a sampler's answer only on its portion. The result therefore
does not depend on the speed of the samplers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_plugin_processes.split import in_order, split_requests

if TYPE_CHECKING:
    from engine_core.types import Request, Rollout
    from engine_plugin_processes.worker_group import RemoteWorkerGroup
    from engine_plugin_processes.worker_pool import Reply


def portions_of(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Split requests into lists of at most ``size``: longest prompts first, equal prompts together, as samplers do."""
    ordered = sorted(requests, key=lambda r: (-len(r.prompt.token_ids), r.prompt.token_ids))
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


class Portions:
    """The portions of one call, sent to slices as these become free.

    If a slice is lost and the run survives that, its unfinished requests go to the others.

    consumes: answers of slices; waits for: nothing; unblocked by: answers, errors, ``stop``; produces: ``reply``,
    with the rollouts in the order of their requests, or with the first error.

    Args:
        group: group of the slices.
        portions: sent in this order.
        requests: the requests of all portions.
        on_part: called with rollouts as they finish; they are not in the result. None: all are in the result.
    """

    def __init__(
        self,
        group: RemoteWorkerGroup,
        portions: Sequence[list[Request]],
        requests: Sequence[Request],
        on_part: Callable[[list[Rollout]], None] | None = None,
    ) -> None:
        self._group, self._on_part, self._merge = group, on_part, in_order(requests)
        # engines whose ranks wait for each other are all called, even without a request
        self._left = deque(portion for portion in portions if portion or not group.independent)
        self._idle = deque(group.present)
        self._running: dict[int, tuple[Reply, list[Request], set[str]]] = {}
        self._answers: list[Any] = []
        self._error: BaseException | None = None
        self._stopped = False
        self._lock = threading.RLock()
        self.reply = group.crew.reply(self.stop)
        self._go_on()

    def stop(self) -> None:
        """Drop the portions that are left, and abandon those in flight."""
        with self._lock:
            self._stopped = True
            self._left.clear()
            for reply, *_ in self._running.values():
                reply.give_up()

    def _go_on(self) -> None:
        """Send the remaining portions to idle slices; set the result after the last answer."""
        with self._lock:
            while self._left and self._idle:
                at, portion, received = self._idle.popleft(), self._left.popleft(), set[str]()
                on_part = None if self._on_part is None else partial(self._part, received)
                future = self._group.generate_on(at, portion, on_part)
                self._running[at] = future, portion, received
                future.add_done_callback(partial(self._answered, at))
            if not self._running and not self.reply.done():
                self._finish()

    def _part(self, received: set[str], part: list[Rollout]) -> None:
        """Pass a part on, and note its requests as answered."""
        received.update(rollout.request_id for rollout in part)
        assert self._on_part is not None
        self._on_part(part)

    def _answered(self, at: int, future: Future[Any]) -> None:
        with self._lock:
            _, portion, received = self._running.pop(at)
            error = future.exception()
            if error is None:
                self._answers.append(future.result())
                self._idle.append(at)
            elif self._error is None and self._group.survives(error):
                rest = [] if self._stopped else [each for each in portion if each.id not in received]
                assert self._group.replacements is not None
                self._group.replacements.reissue(len(rest))
                shares = split_requests(rest, max(len(self._idle), 1))
                self._left.extendleft(share for share in shares if share)
            else:
                self._error = self._error or error
                self.stop()
            self._go_on()

    def _finish(self) -> None:
        try:
            if self._error is not None:
                raise self._error
            result = self._merge(self._answers)
        except BaseException as problem:  # a future's callback would only log it
            self.reply.set_exception(problem)
        else:
            self.reply.set_result(result)
