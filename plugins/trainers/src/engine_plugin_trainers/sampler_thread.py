"""A sampler that is asked while the run does something else: a thread takes what has finished.

The sampler's group is driven by a ``SamplerSession``. The thread takes results and gives them to those who asked. Within ``held``
the engines receive nothing, so that new weights never come in the middle of a call.
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

POLL_SECONDS = 0.1  # between two looks of a waiting caller whether the thread still lives

Taker = Callable[[list["Rollout"]], None]
"""Receives finished rollouts, in the sampling thread; it must not wait for anything."""


@dataclass(slots=True)
class Asked:
    """A request, and whom its rollout is for."""

    request: Request
    taker: Taker


class SamplerThread:
    """A sampler that samples ahead.

    consumes: requests; waits for: results of the session; unblocked by: the session, ``close``; produces: rollouts, given to the
    taker of each request.

    Args:
        group: of the sampler.
        clock: time and threads.
    """

    def __init__(self, group: WorkerGroup, clock: Clock | None = None) -> None:
        self.group, self.clock = group, clock or Clock()
        self.cut = 0  # requests that were cut off by new weights and asked again, since the beginning
        self.kept_tokens = 0  # that these had by then
        self.session = SamplerSession(group, self.clock)
        self._asked: dict[str, Asked] = {}  # by id, until its rollout has come
        self._closing = False
        self._error: BaseException | None = None
        self._busy, self._since = 0.0, 0.0  # seconds with something to sample, and since when
        self._changed = self.clock.condition()
        self._thread = self.clock.thread(self._run, "sampling")
        self._thread.start()

    def ask(self, requests: Sequence[Request], taker: Taker) -> None:
        """Have these sampled; each rollout is given to ``taker`` once."""
        self.ask_all([(requests, taker)])

    def ask_all(self, parts: Sequence[tuple[Sequence[Request], Taker]]) -> None:
        """As ``ask`` for each part; all go to the sampler in one call, whichever thread is quicker."""
        with self._changed:
            for requests, taker in parts:
                if requests and not self._asked:
                    self._since = self.clock.now()
                self._asked |= {request.id: Asked(request, taker) for request in requests}
        self.session.submit([request for requests, _ in parts for request in requests])

    def drop(self, requests: Sequence[Request]) -> None:
        """Forget these: their rollouts are not wanted any more."""
        with self._changed:
            gone = [request.id for request in requests if self._asked.pop(request.id, None)]
            self._rest()
        self.session.submit((), dropped=gone)

    def check(self) -> None:
        """Raise what has ended the thread."""
        if self._error is not None:
            raise self._error

    @property
    def unfinished(self) -> int:
        """Requests without their rollout."""
        return len(self._asked)

    @property
    def busy_seconds(self) -> float:
        """Seconds with something to sample, since the beginning."""
        with self._changed:
            return self._busy + (self.clock.now() - self._since if self._asked else 0.0)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within it the thread sends nothing to the engines: the group is the caller's."""
        with self.session.held():
            self.check()
            yield

    def drained(self) -> None:
        """Wait until nothing is left to sample."""
        with self._changed:
            while self._asked:
                self.check()
                self._changed.wait(POLL_SECONDS)

    def cut_off(self) -> None:
        """Within ``held``: stop what is being sampled (capability ``partial``); it continues from where it was."""
        stopped = self.session.cancel(self.session.in_flight)
        cut = [part for part in stopped if part.finish_reason == "abort" and not part.failure]
        # the others had just ended, of themselves or by their time limit
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
        """End the thread; what is being sampled is left."""
        self._closing = True
        self.session.close()
        self._thread.join()

    # -- in the thread ------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._give(self.session.results())
        except BaseException as error:  # raised again by whoever asks the thread
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
        """Count the time until now, where nothing is left to sample."""
        if not self._asked and self._since:
            self._busy += self.clock.now() - self._since
            self._since = 0.0


class ThreadedSampler(WorkerGroup):
    """A sampler's group, for whoever does not know that a thread asks it, too.

    Args:
        thread: that has requests carried out.
    """

    def __init__(self, thread: SamplerThread) -> None:
        self.thread = thread

    @property
    def world_size(self) -> int:
        return self.thread.group.world_size

    def call(self, method: str, batch: Batch | None = None, split: str = "dp", **plain: Any) -> Future[Any]:
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
