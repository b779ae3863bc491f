"""A role's ranks as a worker group: calls and requests are split over the ranks, results are merged in order.

A group of samplers with ``Replacements`` survives the loss of processes: the others take their unfinished requests.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_core.contracts.runtime import WorkerGroup
from engine_core.errors import WorkerLost
from engine_plugin_processes.flow import Flow
from engine_plugin_processes.generation import Generation
from engine_plugin_processes.split import Merge, Running, merge_plain, split_batch
from engine_plugin_processes.worker_pool import Reply, WorkerPool

if TYPE_CHECKING:
    from engine_core.types import Batch, Request, Rollout
    from engine_plugin_processes.placement import Slice
    from engine_plugin_processes.replacement import Replacements

LEFT_AT_ONCE = frozenset({"generate", "advance", "step", "infer", "forward_backward"})
"""Methods that a stop may leave at any point, where no rank waits for another in them."""
ONE_BY_ONE = frozenset({"add", "advance", "step", "abort"})
"""Methods of a sampler whose requests come and go."""

OnRollouts = Callable[[list["Rollout"]], None]


class RemoteWorkerGroup(WorkerGroup):
    """A worker group over the ranks of one role.

    Args:
        crew: all workers of the run.
        role: name of the role.
        slices: slices of its ranks, by data-parallel rank.
        attention: attention share for ``balance.sequence_cost`` of its model.
        independent: whether no rank waits for another in a call.
        before: called with role and method before each call.
        replacements: knows which ranks are present, if samplers may be lost; every rank is a slice then.
    """

    def __init__(
        self,
        crew: WorkerPool,
        role: str,
        slices: Sequence[Slice],
        attention: float,
        independent: bool,
        before: Callable[[str, str], None] = lambda role, method: None,
        replacements: Replacements | None = None,
    ) -> None:
        self.crew, self.role, self.slices, self.attention = crew, role, slices, attention
        self.independent, self.before = independent, before
        self.replacements = replacements
        self.running = Running(len(slices))
        self._again: list[Request] = []  # of lost processes, for the next call of ``share``
        self._seen = [0] * len(slices)  # losses of each slice whose requests were taken back

    @property
    def world_size(self) -> int:
        """Number of ranks of the role that are present."""
        return sum(len(self.slices[at].ranks) for at in self.present)

    @property
    def present(self) -> list[int]:
        """Numbers of the slices that are present."""
        if self.replacements is None:
            return list(range(len(self.slices)))
        there = set(self.replacements.present)
        return [at for at, each in enumerate(self.slices) if each.leader in there]

    def call(self, method: str, batch: Batch | None = None, split: str = "dp", **plain: Any) -> Reply:
        """Send a call to the slices, with the batch or the requests split over them.

        The result is ``WorkerLost`` if no slice is present.

        Raises:
            ValueError: ``split`` is neither "dp" nor "all".
        """
        if split not in ("dp", "all"):
            raise ValueError(f"split is '{split}'; expected 'dp' or 'all'.")
        if method == "generate":
            return self._generate(plain["requests"])
        self.before(self.role, method)
        present = self.present
        merge: Merge = merge_plain
        batches: Sequence[Batch | None] = [batch] * len(present)
        arguments = [plain] * len(present)
        if batch is not None and split == "dp":
            batches, merge = split_batch(batch, len(present), self.attention)
        elif method in ONE_BY_ONE:
            present, arguments, merge = self._one_by_one(method, plain, present)
            batches = [None] * len(present)
        if not present:
            return self._all_lost()
        messages: dict[int, dict[str, Any]] = {}
        bodies: dict[tuple[int, int], dict[str, Any]] = {}  # one for all ranks with the same arguments
        for at, rows, given in zip(present, batches, arguments, strict=True):
            body = {"kind": "call", "role": self.role, "method": method, "batch": rows, "plain": given}
            shared = bodies.setdefault((id(rows), id(given)), body)
            messages |= dict.fromkeys(self.slices[at].ranks, shared)
        return self.crew.send(
            messages,
            (self.role, method),
            leaders=[self.slices[at].leader for at in present],
            merge=merge,
            interruptible=self.independent and method in LEFT_AT_ONCE,
        )

    def stream(self, requests: Sequence[Request]) -> Generator[list[Rollout], None, None]:
        """Sample all requests; yield rollouts as they arrive.

        The call's error is raised here. A caller that stops early cancels the call.
        """
        parts: queue.SimpleQueue[list[Rollout] | None] = queue.SimpleQueue()
        reply = self._generate(requests, parts.put)
        reply.add_done_callback(lambda _: parts.put(None))
        try:
            while (part := parts.get()) is not None:
                yield part
            reply.result()
        except BaseException:
            reply.give_up()
            raise

    def flow(self, tell: OnRollouts, changed: Callable[[], None]) -> Flow | None:
        """Return a flow if every slice is one independent rank, else None."""
        alone = self.independent and all(len(one.ranks) == 1 for one in self.slices)
        return Flow(self, tell, changed) if alone else None  # the ranks of one engine must run the same calls

    # -- requests that come and go ------------------------------------------

    @property
    def lost_some(self) -> bool:
        """Whether a slice was lost whose unfinished requests have not been taken back yet."""
        return self.replacements is not None and self._seen != self._losses(self.replacements)

    def survives(self, error: BaseException) -> bool:
        """Return whether an error is the loss of a slice that the run survives."""
        return self.replacements is not None and self.replacements.goes_on_without(error)

    def share(self, requests: Sequence[Request], but: Collection[str] = ()) -> list[list[Request]]:
        """Share new requests and those of lost slices among the present slices; return one list for each slice.

        Args:
            requests: new requests.
            but: ids of lost requests that are not sent again.
        """
        self._take_lost()
        again = [each for each in self._again if each.id not in but]
        self._again = [each for each in self._again if each.id in but]
        if not (present := self.present):
            self._again += [*requests, *again]
        if again and present and self.replacements is not None:
            self.replacements.reissue(len(again))
        return self.running.share([*requests, *again] if present else (), present)

    def forget(self, ids: Collection[str]) -> dict[int, list[str]]:
        """Drop requests without a message to the samplers; return slice -> ids of the requests that it has."""
        self._take_lost()
        self._again = [request for request in self._again if request.id not in ids]
        return self.running.forget(ids)

    def _losses(self, replacements: Replacements) -> list[int]:
        return [replacements.losses[each.leader] for each in self.slices]

    def _take_lost(self) -> None:
        """Take back the unfinished requests of lost slices, even if the slice has been replaced already."""
        if self.replacements is not None:
            losses = self._losses(self.replacements)
            for at, (count, seen) in enumerate(zip(losses, self._seen, strict=True)):
                if count != seen:
                    self._seen[at] = count
                    self._again += self.running.lose(at)

    def _one_by_one(
        self, method: str, plain: dict[str, Any], present: list[int]
    ) -> tuple[list[int], list[dict[str, Any]], Merge]:
        """Return the slices that receive a command, the arguments of each, and what merges the results."""
        dropped, stopped = set(plain.get("dropped", ())), set(plain.get("stopped", ()))
        self.forget(dropped)
        arguments = [plain] * len(present)
        if method in ("add", "advance"):
            shares = self.share(plain.get("requests", ()), stopped)
            nothing = {**plain, "requests": []}  # one object, so that it is encoded once
            arguments = [{**plain, "requests": shares[at]} if shares[at] else nothing for at in present]
        if present and method == "advance" and not (dropped or stopped):
            asked = [number for number, at in enumerate(present) if self.running.under_way[at]] or [0]
            present, arguments = [present[n] for n in asked], [arguments[n] for n in asked]
        return present, arguments, partial(self._merged, stopped)

    def _merged(self, stopped: set[str], results: Sequence[Any]) -> Any:
        """Merge the results of the slices that answered; the next call sends the requests of a lost one to others.

        A lost request that was to be stopped is returned as a rollout without a sampled token.
        """
        found = self.running.merge(results)
        self._take_lost()
        early = [request.unsampled() for request in self._again if request.id in stopped]
        self._again = [request for request in self._again if request.id not in stopped]
        return [*found, *early] if isinstance(found, list) else found

    # -- requests that are sampled to their end -----------------------------

    def _generate(self, requests: Sequence[Request], on_part: OnRollouts | None = None) -> Reply:
        """Sample all requests; rollouts that were passed to ``on_part`` are not in the result."""
        self.before(self.role, "generate")
        return Generation(self, requests, on_part).reply if self.present else self._all_lost()

    def generate_on(self, at: int, requests: Sequence[Request], on_part: OnRollouts) -> Reply:
        """Have one slice sample the requests; its rollouts come in parts, and in the result if its engine sends none."""
        chosen, plain = self.slices[at], {"requests": list(requests)}
        message = {"kind": "call", "role": self.role, "method": "generate", "batch": None, "plain": plain}
        return self.crew.send(
            dict.fromkeys(chosen.ranks, message),
            (self.role, "generate"),
            leaders=[chosen.leader],
            interruptible=self.independent,
            on_part=on_part,
        )

    def _all_lost(self) -> Reply:
        """Return a reply that has failed with ``WorkerLost``: no process is present until one is replaced."""
        worker = self.crew.workers[self.slices[0].leader]
        reply = Reply(lambda: None)
        reply.set_exception(WorkerLost(self.role, worker.rank, worker.host, "it is being replaced"))
        return reply
