"""A sampling thread: it takes finished rollouts while the main thread does something else.

A ``SamplerSession`` drives the sampler's group. The thread takes results and passes them to the takers of the requests.
Within ``held`` the thread sends nothing to the engines, so new weights never arrive in the middle of a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.contracts.runtime import WorkerGroup
from engine_core.sampler_session import SamplerSession
from engine_core.train.clock import Clock

if TYPE_CHECKING:
    from engine_core.types import Batch, Request, Rollout

POLL_SECONDS = 0.1  # interval at which a waiting caller checks that the thread is alive

Taker = Callable[[list["Rollout"]], None]
"""Callback for finished rollouts, called in the sampling thread; it must not block."""


@dataclass(slots=True)
class Asked:
    """A request and the taker of its rollout."""

    request: Request
    taker: Taker


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
        self._asked: dict[str, Asked] = {}  # by id, until its rollout arrives
        self._closing = False
        self._error: BaseException | None = None
        # seconds with requests in flight; start of the current busy period, or 0
        self._busy, self._since = 0.0, 0.0
        self._changed = self.clock.condition()
        self._thread = self.clock.thread(self._run, "sampling")
        self._thread.start()

    def ask(self, requests: Sequence[Request], taker: Taker) -> None:
        """Submit requests; each rollout is passed to ``taker`` once."""
        self.ask_all([(requests, taker)])

    def ask_all(self, parts: Sequence[tuple[Sequence[Request], Taker]]) -> None:
        """Submit several parts as ``ask`` does; all requests reach the sampler in one call."""
        with self._changed:
            for requests, taker in parts:
                if requests and not self._asked:
                    self._since = self.clock.now()
                self._asked |= {request.id: Asked(request, taker) for request in requests}
        self.session.submit([request for requests, _ in parts for request in requests])

    def drop(self, requests: Sequence[Request]) -> None:
        """Cancel requests whose rollouts are no longer needed."""
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
    def unfinished(self) -> int:
        """Number of requests whose rollout has not arrived."""
        return len(self._asked)

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

    def drained(self) -> None:
        """Wait until no request is in flight."""
        with self._changed:
            while self._asked:
                self.check()
                self._changed.wait(POLL_SECONDS)

    def cut_off(self) -> None:
        """Stop all responses (capability ``partial``) and resubmit them from where they stopped; within ``held``."""
        stopped = self.session.cancel(self.session.in_flight)
        cut = [part for part in stopped if part.finish_reason == "abort" and not part.failure]
        # the others had just ended by themselves or at their time limit
        self._give([part for part in stopped if all(part is not each for each in cut)])
        again = []
        for part in cut:
            sampled = part.sampled_length
            request = self._asked[part.request_id].request
            again.append(dataclasses.replace(request, begun=part if sampled else None))
            self.cut += 1
            self.kept_tokens += sampled
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
        takers: dict[Taker, list[Rollout]] = {}
        for rollout in finished:
            asked = self._asked.get(rollout.request_id)
            if asked is not None:
                takers.setdefault(asked.taker, []).append(rollout)
        for taker, rollouts in takers.items():
            taker(rollouts)
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


class ThreadedSampler(WorkerGroup):
    """A worker group that shares the sampler with its sampling thread.

    Args:
        thread: the sampling thread, which submits the requests.
    """

    def __init__(self, thread: SamplerThread) -> None:
        self.thread = thread

    @property
    def world_size(self) -> int:
        """Number of ranks of the sampler's group."""
        return self.thread.group.world_size

    def call(self, method: str, batch: Batch | None = None, split: str = "dp", **plain: Any) -> Future[Any]:
        """Send ``generate`` through the thread, and other methods to the group while the thread is held."""
        future: Future[Any] = Future()
        if method == "generate":
            requests = plain["requests"]
            found = {r.request_id: r for part in self.stream(requests) for r in part}
            future.set_result([found[request.id] for request in requests])
        else:
            with self.thread.held():
                future.set_result(self.thread.group.call(method, batch, split, **plain).result())
        return future

    def stream(self, requests: Sequence[Request]) -> Generator[list[Rollout], None, None]:
        """Yield rollouts as they finish; cancel the rest if the caller stops early."""
        parts: queue.SimpleQueue[list[Rollout]] = queue.SimpleQueue()
        left = len(requests)
        self.thread.ask(requests, parts.put)
        try:
            while left:
                with contextlib.suppress(queue.Empty):
                    part = parts.get(timeout=POLL_SECONDS)
                    left -= len(part)
                    yield part
                self.thread.check()
        finally:
            if left:
                self.thread.drop(requests)
