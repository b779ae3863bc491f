"""A sampling thread: it takes finished rollouts while the main thread does something else.

A ``SamplerSession`` drives the sampler's group. The thread takes results and passes them to the takers of the requests.
Within ``held`` the thread sends nothing to the engines, so new weights never arrive in the middle of a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from engine_core.sampler_session import SamplerSession
from engine_core.train.clock import Clock

if TYPE_CHECKING:
    from engine_core.contracts.runtime import WorkerGroup
    from engine_core.types import Request, Rollout

POLL_SECONDS = 0.1  # interval at which a waiting caller checks that the thread is alive

Taker = Callable[["Rollout"], None]
"""Callback for a finished rollout, called in the sampling thread; it must not block."""


class SamplerThread:
    """A thread that samples ahead.

    consumes: requests; waits for: results of the session; unblocked by: the session, ``close``; produces: rollouts,
    passed to the taker of each request.

    Args:
        group: the sampler's worker group.
        clock: source of time and threads.
    """

    def __init__(self, group: WorkerGroup, clock: Clock | None = None) -> None:
        self.group, self.clock = group, clock or Clock()
        self.cut = 0  # requests that new weights stopped and that were submitted again, since the start
        self.kept_tokens = 0  # tokens that these had when they were stopped
        self.session = SamplerSession(group, self.clock)
        self._asked: dict[str, tuple[Request, Taker]] = {}  # by id, until its rollout arrives
        self._closing = False
        self._error: BaseException | None = None
        # seconds with requests in flight; start of the current busy period, or 0
        self._busy, self._since = 0.0, 0.0
        self._changed = self.clock.condition()
        self._thread = self.clock.thread(self._run, "sampling")
        self._thread.start()

    def ask(self, *parts: tuple[Sequence[Request], Taker]) -> None:
        """Submit requests with the taker of their rollouts; all parts reach the sampler in one call."""
        with self._changed:
            for requests, taker in parts:
                if requests and not self._asked:
                    self._since = self.clock.now()
                self._asked |= {request.id: (request, taker) for request in requests}
        self.session.submit([request for requests, _ in parts for request in requests])

    def stream(self, requests: Sequence[Request]) -> Generator[list[Rollout], None, None]:
        """Yield rollouts as they finish, next to those of other callers; cancel the rest if the caller stops early."""
        finished: queue.SimpleQueue[Rollout] = queue.SimpleQueue()
        left = len(requests)
        self.ask((requests, finished.put))
        try:
            while left:
                with contextlib.suppress(queue.Empty):
                    rollout = finished.get(timeout=POLL_SECONDS)
                    left -= 1
                    yield [rollout]
                self.check()
        finally:
            if left:
                with self._changed:
                    gone = [request.id for request in requests if self._asked.pop(request.id, None)]
                    self._rest()
                self.session.submit((), dropped=gone)

    def check(self) -> None:
        """Raise the error that ended the thread, if it has ended.

        Raises:
            BaseException: that error.
        """
        if self._error is not None:
            raise self._error

    @property
    def busy_seconds(self) -> float:
        """Seconds with requests in flight, since the start."""
        with self._changed:
            return self._busy + (self.clock.now() - self._since if self._asked else 0.0)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the thread from sending anything to the engines, so that the caller may use the group."""
        with self.session.held():
            self.check()
            yield

    @contextlib.contextmanager
    def updating(self, mode: str) -> Iterator[None]:
        """Hold the thread while the caller updates the weights.

        Args:
            mode: treatment of responses in flight. ``drain``: wait for them; ``abort``: stop them, to resume where they
                stopped; ``keep``: pause the sampler.
        """
        if mode == "drain":
            self.drained()
        with self.held():
            if mode == "abort":
                self.cut_off()
            if mode == "keep":
                self.group.call("pause", mode="keep").result()
            yield
            if mode == "keep":
                self.group.call("resume").result()

    def drained(self) -> None:
        """Wait until no request is in flight."""
        with self._changed:
            while self._asked:
                self.check()
                self._changed.wait(POLL_SECONDS)

    def cut_off(self) -> None:
        """Stop all responses (capability ``partial``) and resubmit them from where they stopped; within ``held``."""
        again: list[Request] = []
        ended: list[Rollout] = []  # by themselves or at their time limit
        for part in self.session.cancel(self.session.in_flight):
            if part.finish_reason != "abort" or part.failure:
                ended.append(part)
                continue
            sampled, (request, _) = part.sampled_length, self._asked[part.request_id]
            again.append(dataclasses.replace(request, begun=part if sampled else None))
            self.cut += 1
            self.kept_tokens += sampled
        self._give(ended)
        self.session.submit(again)

    def close(self) -> None:
        """End the thread and abandon the requests in flight."""
        self._closing = True
        self.session.close()
        self._thread.join()

    # -- in the thread ------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._give(self.session.results())
        except BaseException as error:  # `check` raises it in the caller
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _give(self, finished: Sequence[Rollout]) -> None:
        for rollout in finished:
            if (asked := self._asked.get(rollout.request_id)) is not None:
                asked[1](rollout)
        with self._changed:
            for rollout in finished:
                self._asked.pop(rollout.request_id, None)
            self._rest()
            if not self._asked:
                self._changed.notify_all()

    def _rest(self) -> None:
        """End the busy period if no request is in flight."""
        if not self._asked and self._since:
            self._busy += self.clock.now() - self._since
            self._since = 0.0
