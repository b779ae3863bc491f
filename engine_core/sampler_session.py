"""The session that drives the engines of a sampler's group: submit requests, take results, cancel.

Rounds, early stops, multi-turn episodes and asynchronous sampling are policies built on it. The engines are called in
rounds (``WorkerGroup.call("advance")``), each of which waits for all engines, or run continuously
(``WorkerGroup.flow``) and send rollouts as they finish. The order of results does not affect the content of a rollout:
each request has a seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from engine_core.timeline import Clock

if TYPE_CHECKING:
    from engine_core.contracts.runtime import Flow, WorkerGroup
    from engine_core.types import Request, Rollout


class SamplerSession:
    """The in-flight requests of a sampler's group.

    ``submit``, ``cancel``, ``abandon`` and ``held`` may be called from other threads than ``results``.

    consumes: requests; waits for: in ``results`` for a rollout, a request or the end of a hold; unblocked by:
    ``submit``, the threads that read replies, the end of ``held``, ``close``; produces: each rollout once.

    Args:
        group: the sampler's worker group.
        clock: time and threads.
        rounds: call the engines in rounds; the content of a result then depends on the requests alone, not on timing.
    """

    def __init__(self, group: WorkerGroup, clock: Clock | None = None, rounds: bool = False) -> None:
        self.group = group
        self._clock = clock or Clock()
        self._changed = self._clock.condition()
        self._new: list[Request] = []
        self._dropped: list[str] = []
        self._running: dict[str, Request] = {}  # those that the engines have, by id
        self._since: dict[str, float] = {}  # when the engines got those with a deadline, by id
        self._arrived: list[Rollout] = []
        self._holds = 0
        self._late: list[Request] | None = None  # submitted while `drained` waits
        self._calling = self._closed = self._woken = False
        self._reply: Future[Any] | None = None  # of the current round
        self._flow: Flow | None = None if rounds else group.flow(self._put, functools.partial(self._put, ()))

    @property
    def in_flight(self) -> list[str]:
        """The ids of the requests that the engines have."""
        with self._changed:
            return sorted(self._running)

    @property
    def idle(self) -> bool:
        """Whether no request is queued or in flight, and all results were taken."""
        return not (self._new or self._running or self._arrived)

    def submit(self, requests: Sequence[Request], dropped: Sequence[str] = ()) -> None:
        """Queue requests and drop others; the next ``results`` sends both to the engines in one call.

        Args:
            requests: new requests; no request in flight has their ids.
            dropped: ids of requests to abort; their rollouts are discarded.
        """
        with self._changed:
            gone = set(dropped)
            self._new = [request for request in self._new if request.id not in gone]
            if self._late is None:
                self._new += requests
            else:
                self._late = [request for request in self._late if request.id not in gone] + list(requests)
            self._arrived = [rollout for rollout in self._arrived if rollout.request_id not in gone]
            self._dropped += sorted(gone & self._running.keys())
            self._forget(gone)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let ``results`` return if it waits, without a rollout if none has finished."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def results(self, timeout: float | None = None, rounds: int = 1) -> list[Rollout]:
        """Return rollouts that have finished, in the order in which they finished.

        Args:
            timeout: seconds to wait for the first rollout; None: no limit. A round that has started is waited for
                in any case.
            rounds: engine steps per call, if the engines are called in rounds.

        Returns:
            The rollouts; none after ``timeout``, ``wake``, or a round in which none has finished, or if the session
            is closed.

        Raises:
            EngineError: an engine has failed, or was lost and is not replaced.
        """
        while True:
            with self._changed:
                in_time = self._changed.wait_for(self._has_work, timeout)
                woken, self._woken = self._woken, False
                if self._closed or not in_time:
                    return []
                if self._arrived or woken:
                    arrived, self._arrived = self._arrived, []
                    self._changed.notify_all()
                    return arrived
                if self._flow is not None and self._flow.error is not None:
                    raise self._flow.error
                new, dropped, self._new, self._dropped = self._new, self._dropped, [], []
                self._running |= {request.id: request for request in new}
                timed = [request.id for request in new if request.sampling.timeout_s > 0]
                self._since |= dict.fromkeys(timed, self._clock.now())
                self._calling = True
            try:
                if self._flow is not None:
                    self._flow.go(new, dropped)
                    continue
                return self._round(new, dropped, rounds)
            finally:
                with self._changed:
                    self._calling = False
                    self._changed.notify_all()

    def cancel(self, ids: Collection[str]) -> list[Rollout]:
        """Abort requests and return their rollouts.

        Args:
            ids: ids of requests; an id that is not in flight is ignored.

        Returns:
            Partial rollouts, with finish reason ``abort``, and those that had just finished. A request that was still
            queued in this session has no rollout.
        """
        with self.held():
            with self._changed:
                self._new = [request for request in self._new if request.id not in ids]
                running = sorted(self._running.keys() & set(ids))
                # another thread may have dropped some of these, which the engines do not know yet
                dropped, self._dropped = self._dropped, []
            found: list[Rollout] = []
            if running or dropped:  # rounds = 0: the other requests continue at the next call of results
                found = self.group.call("advance", dropped=dropped, stopped=running, rounds=0).result()
            with self._changed:
                early = {each.request_id: each for each in self._arrived if each.request_id in ids}
                self._arrived = [each for each in self._arrived if each.request_id not in ids]
                self._forget(running)
        return [*early.values(), *(each for each in found if each.request_id not in early)]

    def interrupt(self) -> list[Rollout]:
        """Stop all responses (capability ``partial``) and submit them again, to continue where they stopped.

        A deadline (``Sampling.timeout_s``) stays where it was.

        Returns:
            The stopped parts. Responses that had just ended come from ``results``.
        """
        with self._changed:
            requests, since = dict(self._running), dict(self._since)
        parts = self.cancel(requests)
        stopped = [part for part in parts if part.finish_reason == "abort" and not part.failure]
        with self._changed:
            self._arrived += [part for part in parts if part.finish_reason != "abort" or part.failure]
        for part in stopped:
            request, sampling = requests[part.request_id], requests[part.request_id].sampling
            if (start := since.get(request.id)) is not None:
                left = sampling.timeout_s - (self._clock.now() - start)
                sampling = dataclasses.replace(sampling, timeout_s=max(left, 1e-3))
            begun = part if part.sampled_length else None
            self.submit([dataclasses.replace(request, sampling=sampling, begun=begun)])
        return stopped

    def abandon(self) -> None:
        """Drop all requests; return when the engines have dropped them."""
        with self.held():
            with self._changed:
                dropped = sorted({*self._dropped, *self._running})
                self._new, self._dropped, self._arrived = [], [], []
                self._forget(dropped)
            if dropped:
                self.group.call("advance", dropped=dropped).result()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Pause sampling within the context, so that weights may be updated.

        On entry it waits for the current round; within it ``results`` sends nothing to the engines.

        Raises:
            BaseException: the wait was interrupted; sampling is not paused.
        """
        with self._changed:
            self._holds += 1
            try:
                self._changed.wait_for(lambda: not self._calling)
            except BaseException:
                self._holds -= 1
                raise
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def drained(self) -> Iterator[None]:
        """Pause sampling, as ``held``, when all requests so far have ended; later ones wait for the end of the context.

        Another thread takes results meanwhile.
        """
        with self._changed:
            self._late = []
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.idle)
            with self.held():
                yield
        finally:
            with self._changed:
                late, self._late = self._late or [], None
            self.submit(late)

    def close(self) -> None:
        """Abandon the requests in flight; a thread that waits in ``results`` returns."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._abandon_round()
        if self._flow is not None:
            self._flow.close()

    def _forget(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._running.pop(id, None)
            self._since.pop(id, None)

    def _has_work(self) -> bool:
        if self._closed or self._arrived or self._woken:
            return True
        if self._holds:
            return False
        if self._flow is not None:
            return bool(self._new or self._dropped or self._flow.resting or self._flow.error)
        return bool(self._new or self._dropped or self._running)

    def _round(self, new: Sequence[Request], dropped: Sequence[str], rounds: int) -> list[Rollout]:
        self._reply = self.group.call("advance", requests=new, dropped=dropped, rounds=rounds)
        if self._closed:  # `close` was called before this round existed
            self._abandon_round()
        found: list[Rollout] = self._reply.result()
        with self._changed:
            self._forget(rollout.request_id for rollout in found)
        return found

    def _put(self, rollouts: Sequence[Rollout]) -> None:
        """Store rollouts of the flow and wake ``results``. Called in a thread that reads replies."""
        with self._changed:
            for rollout in rollouts:
                # a request that was sent again after a loss counts once, with its first rollout
                if rollout.request_id in self._running:
                    self._forget([rollout.request_id])
                    self._arrived.append(rollout)
            self._changed.notify_all()

    def _abandon_round(self) -> None:
        """End the current round early, if its call supports that."""
        if (give_up := getattr(self._reply, "give_up", None)) is not None:
            give_up()
