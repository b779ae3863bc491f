"""A sampling thread: it takes finished rollouts while the main thread does something else.

A ``SamplerSession`` drives the sampler's group. The thread takes results and passes them to the takers of the requests.
Within ``held`` the thread sends nothing to the engines, so new weights never arrive in the middle of a call.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from engine_core.sampler_session import SamplerSession
from engine_core.timeline import Clock

if TYPE_CHECKING:
    from engine_core.contracts.parts import Episodes
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
        environment: plays an episode for each request; None: a request gives one response.
    """

    def __init__(
        self, group: WorkerGroup, clock: Clock | None = None, environment: Episodes | None = None
    ) -> None:
        self.group, self.clock = group, clock or Clock()
        self.cut = 0  # requests that new weights stopped and that were submitted again, since the start
        self.kept_tokens = 0  # tokens that these had when they were stopped
        self.turns = SamplerSession(group, self.clock)
        self.session = environment.session(self.turns) if environment else self.turns
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
        with self.turns.held():
            self.check()
            yield

    @contextlib.contextmanager
    def updating(self, mode: str) -> Iterator[None]:
        """Hold the thread while the caller updates the weights.

        Args:
            mode: treatment of responses in flight, or of turns of episodes. ``drain``: wait for them; ``abort``: stop
                them, to resume where they stopped; ``keep``: pause the sampler.
        """
        with self.turns.drained() if mode == "drain" else self.held():
            self.check()
            if mode == "abort":
                stopped = self.turns.interrupt()
                self.cut += len(stopped)
                self.kept_tokens += sum(part.sampled_length for part in stopped)
            if mode == "keep":
                self.group.call("pause", mode="keep").result()
            yield
            if mode == "keep":
                self.group.call("resume").result()

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
            self.session.close()  # `drained` must not wait for results that no thread takes

    def _give(self, finished: Sequence[Rollout]) -> None:
        for rollout in finished:
            if (asked := self._asked.get(rollout.request_id)) is not None:
                asked[1](rollout)
        with self._changed:
            for rollout in finished:
                self._asked.pop(rollout.request_id, None)
            self._rest()

    def _rest(self) -> None:
        """End the busy period if no request is in flight."""
        if not self._asked and self._since:
            self._busy += self.clock.now() - self._since
            self._since = 0.0
