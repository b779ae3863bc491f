"""Requests beyond the samplers' capacity: sent in portions, each to the next free sampler.

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

from engine_plugin_processes.worker_pool import Reply

if TYPE_CHECKING:
    from engine_core.types import Request
    from engine_plugin_processes.split import Merge


def portions_of(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Split requests into lists of at most ``size``: longest prompts first, equal prompts together, as samplers do."""
    ordered = sorted(requests, key=lambda r: (-len(r.prompt.token_ids), r.prompt.token_ids))
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


class Portions:
    """The portions of one call, sent to slices as these become free.

    consumes: answers to ``send``; waits for: nothing; unblocked by: answers, errors, ``stop``; produces: ``reply``,
    with what ``merge`` makes of all answers, or with the first error.

    Args:
        portions: sent in this order.
        slices: number of slices.
        send: sends a portion to a slice.
        merge: merges the answers, which arrive in any order, into one result.
    """

    def __init__(
        self,
        portions: Sequence[list[Request]],
        slices: int,
        send: Callable[[int, list[Request]], Future[Any]],
        merge: Merge,
    ) -> None:
        self._left, self._send, self._merge = deque(portions), send, merge
        self._running: dict[int, Future[Any]] = {}
        self._answers: list[Any] = []
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        self.reply = Reply(self.stop)
        for at in range(min(slices, len(portions))):
            self._next(at)

    def stop(self) -> None:
        """Drop the portions that are left, and abandon those in flight."""
        with self._lock:
            self._left.clear()
            for future in self._running.values():
                if isinstance(future, Reply):
                    future.give_up()

    def _next(self, at: int) -> None:
        with self._lock:
            if not self._left:
                return
            future = self._running[at] = self._send(at, self._left.popleft())
        future.add_done_callback(partial(self._answered, at))

    def _answered(self, at: int, future: Future[Any]) -> None:
        with self._lock:
            del self._running[at]
            error = future.exception()
            if error is None:
                self._answers.append(future.result())
            elif self._error is None:
                self._error = error
                self.stop()
            self._next(at)
            over = not self._running and not self.reply.done()
            if over and self._error is not None:
                self.reply.set_exception(self._error)
            elif over:
                self._finish()

    def _finish(self) -> None:
        try:
            result = self._merge(self._answers)
        except Exception as problem:  # a future's callback would only log it
            self.reply.set_exception(problem)
        else:
            self.reply.set_result(result)
