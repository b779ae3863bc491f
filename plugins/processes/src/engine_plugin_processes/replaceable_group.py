"""A worker group of samplers that survives the loss of processes: the others take their requests, once."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from engine_core.errors import WorkerLost
from engine_plugin_processes.flow import Flow, given
from engine_plugin_processes.portions import Portions, portions_of
from engine_plugin_processes.split import in_order, split_requests
from engine_plugin_processes.worker_group import ONE_BY_ONE, RemoteWorkerGroup
from engine_plugin_processes.worker_pool import Reply, message_to

if TYPE_CHECKING:
    from engine_core.types import Batch, Request, Rollout
    from engine_plugin_processes.replacement import Replacements

OnRollouts = Callable[[list["Rollout"]], None]


class ReplaceableGroup(RemoteWorkerGroup):
    """A ``RemoteWorkerGroup`` that survives the loss of samplers; every rank is a slice.

    Args:
        group: the group without losses; its slices are those of all ranks.
        replacements: knows which ranks are present.
    """

    def __init__(self, group: RemoteWorkerGroup, replacements: Replacements) -> None:
        super().__init__(
            group.crew, group.role, group.slices, group.attention, True, group.capacity, group.before
        )
        self.every, self.replacements = list(group.slices), replacements
        self._again: list[Request] = []  # of lost processes, for the next ``advance`` or ``go``
        self._seen = [0] * len(self.every)  # losses of each slice whose requests were taken back

    @property
    def world_size(self) -> int:
        """Number of ranks that are present."""
        return len(self.replacements.present)

    def call(self, method: str, batch: Batch | None = None, split: str = "dp", **plain: Any) -> Future[Any]:
        """Call a method on the slices that are present; the result is ``WorkerLost`` if none is."""
        present = self._present()
        if method in ONE_BY_ONE:
            self.before(self.role, method)
            return self._one_by_one(method, plain, present)
        if not present:
            return self._all_lost()
        self.slices = [self.every[at] for at in present]
        return super().call(method, batch, split, **plain)

    def flow(self, tell: OnRollouts, changed: Callable[[], None]) -> Flow:
        """Return a flow that survives the loss of samplers."""
        return SurvivingFlow(self, tell, changed)

    @property
    def lost_some(self) -> bool:
        """Whether a slice was lost whose unfinished requests have not been taken back yet."""
        return self._seen != [self.replacements.losses[each.leader] for each in self.every]

    def take_lost(self) -> None:
        """Queue the unfinished requests of lost slices again, even if the slice has been replaced already."""
        for at, each in enumerate(self.every):
            if (losses := self.replacements.losses[each.leader]) != self._seen[at]:
                self._seen[at] = losses
                self._again += self.running.lose(at)

    def shares(self, requests: Sequence[Request], dropped: set[str]) -> list[list[Request]]:
        """Share new requests and those of lost slices among the present slices; return one list for each slice.

        Args:
            requests: new requests.
            dropped: ids of requests that were canceled.
        """
        self.take_lost()
        present = self._present()
        again, self._again = [each for each in self._again if each.id not in dropped], []
        if not present:
            self._again = [*requests, *again]
            return [[] for _ in self.every]
        self.replacements.reissue(len(again))
        return self.running.share([*requests, *again], present, whole_groups=True)

    def forget(self, ids: Collection[str]) -> None:
        """Drop requests without a message to the samplers."""
        self.take_lost()
        self.running.forget(ids)
        self._again = [request for request in self._again if request.id not in ids]

    def _all_lost(self) -> Future[Any]:
        """Return a future that has failed with ``WorkerLost``: no process is present until one is replaced."""
        worker = self.crew.workers[self.every[0].leader]
        reply: Future[Any] = Future()
        reply.set_exception(WorkerLost(self.role, worker.rank, worker.host, "it is being replaced"))
        return reply

    def _present(self) -> list[int]:
        """Return the numbers of the slices that are present."""
        there = set(self.replacements.present)
        return [at for at, each in enumerate(self.every) if each.leader in there]

    # -- requests that come and go ------------------------------------------

    def _one_by_one(self, method: str, plain: Mapping[str, Any], present: Sequence[int]) -> Future[Any]:
        """Send a command to each present slice.

        If a slice is lost meanwhile, the next call sends its requests to the others.
        """
        if not present:
            self._again += plain.get("requests", ())
            self.forget({*plain.get("dropped", ())})
            return self._all_lost()
        self.take_lost()
        dropped, stopped = set(plain.get("dropped", ())), set(plain.get("stopped", ()))
        self.running.forget(dropped)
        again = [request for request in self._again if request.id not in dropped]
        ended = [request for request in again if request.id in stopped]
        again = [request for request in again if request.id not in stopped]
        arguments = [dict(plain) for _ in present]
        self._again = again
        if method in ("add", "advance"):
            self._again = []
            self.replacements.reissue(len(again))
            shares = self.running.share([*plain.get("requests", ()), *again], present, whole_groups=True)
            arguments = [{**plain, "requests": shares[at]} for at in present]
        futures = [self._to(at, method, given, None) for at, given in zip(present, arguments, strict=True)]
        early = [request.unsampled() for request in ended]
        return _Together(futures, functools.partial(self._merged, present, stopped, early)).reply

    def _merged(
        self, asked: Sequence[int], stopped: set[str], early: list[Rollout], results: Sequence[Any]
    ) -> Any:
        """Merge the results of the slices that answered.

        A lost request that was to be stopped is returned as a rollout without a sampled token.
        """
        there = set(self._present())
        for at in asked:
            if at not in there:
                lost = self.running.lose(at)
                early += [request.unsampled() for request in lost if request.id in stopped]
                self._again += [request for request in lost if request.id not in stopped]
        found = self.running.merge(results) if results else []
        return [*found, *early] if isinstance(found, list) else found

    # -- requests that are sampled to their end -----------------------------

    def _generate(self, requests: Sequence[Request], on_part: OnRollouts | None = None) -> Future[Any]:
        self.before(self.role, "generate")
        present = self._present()
        if 0 < self.capacity * len(present) < len(requests):
            portions = portions_of(requests, self.capacity)
        else:
            portions = split_requests(requests, len(present))[0]
        send = functools.partial(self._portion, on_part=on_part)
        return Surviving(portions, present, send, in_order(requests), self.replacements).reply

    def _portion(
        self, at: int, requests: list[Request], received: set[str], on_part: OnRollouts | None
    ) -> Future[Any]:
        """Have one slice sample the requests; add to ``received`` the ids of rollouts that arrive in parts."""

        def tell(part: list[Rollout]) -> None:
            """Note the ids of a part and pass the part on."""
            received.update(rollout.request_id for rollout in part)
            assert on_part is not None
            on_part(part)

        plain = {"requests": requests}
        return self._to(at, "generate", plain, tell if on_part is not None else None)

    def _to(self, at: int, method: str, plain: Mapping[str, Any], on_part: OnRollouts | None) -> Future[Any]:
        number, rank = self.crew.next_number(), self.every[at].leader
        message = message_to(
            number, "call", role=self.role, method=method, batch=None, plain=dict(plain), parts=on_part is not None
        )  # fmt: skip
        return self.crew.send(
            {rank: message}, (self.role, method), number, interruptible=True, on_part=on_part or (lambda part: None)
        )  # fmt: skip


class SurvivingFlow(Flow):
    """A ``Flow`` that survives the loss of samplers: ``go`` sends their unfinished requests to the others.

    After a loss ``resting`` is true, so that the owner of the flow calls ``go``. A replacement process starts without
    requests and gets its share like the others.
    """

    group: ReplaceableGroup

    @property
    def resting(self) -> bool:
        """Whether a sampler has requests and no command, or a slice was lost."""
        return super().resting or self.group.lost_some

    def _shares(self, requests: Sequence[Request], dropped: set[str]) -> dict[int, list[Request]]:
        return given(self.group.shares(requests, dropped))

    def _there(self) -> set[int]:
        return set(self.group._present())

    def _leader(self, at: int) -> int:
        return self.group.every[at].leader

    def _goes_on_without(self, error: BaseException) -> bool:
        return self.group.replacements.goes_on_without(error)


class Surviving(Portions):
    """``Portions`` that survive the loss of a slice: its unfinished requests return to the front of the queue.

    Args:
        portions: sent in this order.
        slices: numbers of the slices that are present.
        send: sends a portion to a slice; its set collects the ids of rollouts that arrive in parts.
        merge: as in ``Portions``.
        replacements: counts the requests that are sent again.
    """

    def __init__(
        self,
        portions: Sequence[list[Request]],
        slices: Sequence[int],
        send: Callable[[int, list[Request], set[str]], Future[Any]],
        merge: Callable[[Sequence[Any]], Any],
        replacements: Replacements,
    ) -> None:
        self._under_way: dict[int, tuple[list[Request], set[str]]] = {}
        self._idle: list[int] = []
        self._stopped = False
        self._replacements = replacements

        def sent(at: int, requests: list[Request]) -> Future[Any]:
            """Send a portion and note it as in flight on its slice."""
            received: set[str] = set()
            self._under_way[at] = requests, received
            return send(at, requests, received)

        super().__init__([portion for portion in portions if portion], 0, sent, merge)
        self._idle = list(slices)
        if not self._left:
            self._finish()
        self._wake()

    def stop(self) -> None:
        """Stop sending portions, also those of lost slices."""
        self._stopped = True
        super().stop()

    def _wake(self) -> None:
        """Send the remaining portions to idle slices."""
        with self._lock:
            while self._left and self._idle:
                self._next(self._idle.pop(0))

    def _answered(self, at: int, future: Future[Any]) -> None:
        with self._lock:
            requests, received = self._under_way.pop(at)
            if self._survives(future.exception()):
                del self._running[at]
                rest = [request for request in requests if request.id not in received and not self._stopped]
                self._replacements.reissue(len(rest))
                shares = split_requests(rest, max(len(self._idle), 1))[0]
                self._left.extendleft(share for share in shares if share)
                self._wake()
                if not self._running and not self.reply.done():
                    self._finish()
                return
            super()._answered(at, future)
            if at not in self._running:
                self._idle.append(at)

    def _survives(self, error: BaseException | None) -> bool:
        """Return whether the error is the loss of a slice that the run survives."""
        return self._error is None and self._replacements.goes_on_without(error)


class _Together:
    """One reply for commands to several slices; the result leaves out lost slices.

    Args:
        futures: one for each command.
        merge: merges the received answers into one result.
    """

    def __init__(self, futures: Sequence[Future[Any]], merge: Callable[[Sequence[Any]], Any]) -> None:
        self._futures, self._merge = list(futures), merge
        self._left = len(futures)
        self._lock = threading.Lock()
        self.reply = Reply(self._give_up)
        for future in self._futures:
            future.add_done_callback(self._settle)

    def _give_up(self) -> None:
        for future in self._futures:
            if isinstance(future, Reply):
                future.give_up()

    def _settle(self, _: Future[Any]) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        errors = [error for future in self._futures if (error := future.exception()) is not None]
        answers = deque(future.result() for future in self._futures if future.exception() is None)
        others = [error for error in errors if not isinstance(error, WorkerLost)]
        if others or (errors and not answers):
            self.reply.set_exception((others or errors)[0])
            return
        try:
            self.reply.set_result(self._merge(list(answers)))
        except Exception as problem:
            self.reply.set_exception(problem)
