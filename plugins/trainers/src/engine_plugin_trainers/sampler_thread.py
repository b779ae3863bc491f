"""A sampler that is asked while the run does something else: one thread has its requests carried out.

consumes: requests, of whoever asks; waits for: requests, while it has none, and the end of a hold; unblocked by:
``ask``, the end of ``held``, ``close``; produces: rollouts, given to whoever asked for them.

The sampler's group is called by this thread alone, except within ``held``, when the thread stands still: so new
weights never come in the middle of a call. Samplers that can go on by themselves (``WorkerGroup.flow``) are told what is
new, and to go on after a hold, and nothing else; what they have finished is given in the threads that read it. Others
are asked in rounds, each of which waits for all of them.
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
from engine_core.train.clock import Clock

if TYPE_CHECKING:
    from engine_core.contracts.runtime import Flow
    from engine_core.types import Batch, Request, Rollout

POLL_SECONDS = 0.1  # until whoever waits for a rollout looks whether the thread still lives

Taker = Callable[[list["Rollout"]], None]
"""Is given finished rollouts, in some thread; it must not wait for anything."""


@dataclass(slots=True)
class Asked:
    """A request, and whom its rollout is for."""

    request: Request
    taker: Taker


class SamplerThread:
    """See the module.

    Args:
        group: of the sampler.
        clock: time and threads.
    """

    def __init__(self, group: WorkerGroup, clock: Clock | None = None) -> None:
        self.group, self.clock = group, clock or Clock()
        self.cut = 0  # requests that were cut off by new weights and asked again, since the beginning
        self.kept_tokens = 0  # that these had by then
        self._asked: dict[str, Asked] = {}  # by id, until its rollout has come
        self._new: list[Request] = []
        self._dropped: list[str] = []
        self._holds = 0
        self._calling = self._closing = False
        self._error: BaseException | None = None
        self._busy, self._since = 0.0, 0.0  # seconds with something to sample, and since when
        self._changed = self.clock.condition()
        self._reply: Future[Any] | None = None
        self._flow = group.flow(self._give, self._look)
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
                self._new += requests
            self._changed.notify_all()

    def drop(self, requests: Sequence[Request]) -> None:
        """Nobody wants these any more."""
        with self._changed:
            gone = {request.id for request in requests if self._asked.pop(request.id, None)}
            self._new = [request for request in self._new if request.id not in gone]
            self._dropped += gone
            self._rest()
            self._changed.notify_all()

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
        """In which there was something to sample, since the beginning."""
        with self._changed:
            return self._busy + (self.clock.now() - self._since if self._asked else 0.0)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within it the thread calls nobody: the group is the caller's."""
        with self._changed:
            self._holds += 1
            try:
                self._changed.wait_for(lambda: not self._calling)
            except BaseException:
                self._holds -= 1
                raise
        try:
            self.check()
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    def drained(self) -> None:
        """Wait until nothing is left to sample."""
        with self._changed:
            while self._asked:
                self.check()
                self._changed.wait(POLL_SECONDS)

    def cut_off(self) -> None:
        """Within ``held``: stop what is being sampled (capability ``partial``); it goes on from where it was."""
        with self._changed:
            new = {request.id for request in self._new}
            ids = [id for id in self._asked if id not in new]
        if not ids:
            return
        stopped = self.group.call("advance", requests=[], stopped=ids).result()
        cut = [part for part in stopped if part.finish_reason == "abort" and not part.failure]
        # it had just ended, of itself or by its time
        self._give([part for part in stopped if all(part is not each for each in cut)])
        with self._changed:
            for part in cut:
                sampled = part.sampled_length
                request = self._asked[part.request_id].request
                self._new.append(dataclasses.replace(request, begun=part if sampled else None))
                self.cut += 1
                self.kept_tokens += sampled

    def close(self) -> None:
        """End the thread; what is being sampled is left."""
        with self._changed:
            self._closing = True
            reply = self._reply
            self._changed.notify_all()
        _give_up(reply)
        if self._flow is not None:
            self._flow.close()
        self._thread.join()

    # -- in the thread ------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:  # raised again by whoever asks the thread
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _round(self) -> bool:
        """One call of the sampler; False: it was the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or (not self._holds and self._work()))
            if self._closing:
                return False
            requests, dropped, self._new, self._dropped = self._new, self._dropped, [], []
            self._calling = True
        try:
            if self._flow is not None:
                self._go_on(self._flow, requests, dropped)
            else:
                self._advance(requests, dropped)
        finally:
            with self._changed:
                self._calling = False
                self._changed.notify_all()
        return True

    def _go_on(self, flow: Flow, requests: Sequence[Request], dropped: Sequence[str]) -> None:
        """Tell samplers what is new."""
        if flow.error is not None:
            raise flow.error
        flow.go(requests, dropped)
        with self._changed:
            closing = self._closing
        if closing:  # `close` came before these calls were there to be given up
            flow.close()

    def _advance(self, requests: Sequence[Request], dropped: Sequence[str]) -> None:
        """A round of all samplers."""
        reply = self.group.call("advance", requests=requests, dropped=dropped)
        with self._changed:
            self._reply, closing = reply, self._closing
        if closing:  # `close` came before the call was there to be given up
            _give_up(reply)
        self._give(reply.result())

    def _work(self) -> bool:
        if self._flow is not None:
            return bool(self._new or self._dropped or self._flow.resting or self._flow.error)
        return bool(self._new or self._dropped or self._asked)

    def _look(self) -> None:
        """A sampler rests, or has failed."""
        with self._changed:
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
            if self._flow is None or not self._asked:  # else nobody waits for it
                self._changed.notify_all()

    def _rest(self) -> None:
        """Count the time until now, where nothing is left to sample."""
        if not self._asked and self._since:
            self._busy += self.clock.now() - self._since
            self._since = 0.0


def _give_up(reply: Future[Any] | None) -> None:
    """Nobody waits for a call any more, where it can be left."""
    give_up = getattr(reply, "give_up", None)
    if give_up is not None:
        give_up()


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
