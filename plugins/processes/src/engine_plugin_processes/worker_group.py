"""A role's ranks as a worker group: calls and requests are split over the ranks, results are merged in order."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from engine_core.contracts.runtime import WorkerGroup
from engine_plugin_processes.flow import Flow
from engine_plugin_processes.portions import Portions, portions_of
from engine_plugin_processes.split import Merge, Running, in_order, merge_plain, split_batch, split_requests
from engine_plugin_processes.worker_pool import Reply, WorkerPool, message_to

if TYPE_CHECKING:
    from engine_core.types import Batch, Request, Rollout
    from engine_plugin_processes.codec import Encoded, Texts
    from engine_plugin_processes.placement import Slice

LEFT_AT_ONCE = frozenset({"generate", "advance", "step", "infer", "forward_backward"})
"""Methods that a stop may leave at any point, where no rank waits for another in them."""
ONE_BY_ONE = frozenset({"add", "advance", "step", "abort"})
"""Methods of a sampler whose requests come and go."""


class RemoteWorkerGroup(WorkerGroup):
    """A worker group over the ranks of one role.

    Args:
        crew: all workers of the run.
        role: name of the role.
        slices: slices of its ranks, by data-parallel rank.
        attention: attention share for ``packing.sequence_cost`` of its model.
        independent: whether no rank waits for another in a call.
        capacity: requests that a sampler takes at one time; 0: no limit.
        before: called with role and method before each call.
    """

    def __init__(
        self,
        crew: WorkerPool,
        role: str,
        slices: Sequence[Slice],
        attention: float,
        independent: bool,
        capacity: int = 0,
        before: Callable[[str, str], None] = lambda role, method: None,
    ) -> None:
        self.crew, self.role, self.slices, self.attention = crew, role, slices, attention
        self.independent, self.capacity, self.before = independent, capacity, before
        self.running = Running(len(slices))

    @property
    def world_size(self) -> int:
        """Number of ranks of the role."""
        return sum(len(one.ranks) for one in self.slices)

    def call(self, method: str, batch: Batch | None = None, split: str = "dp", **plain: Any) -> Future[Any]:
        """Send a call to the slices, with the batch or the requests split over them.

        Raises:
            ValueError: ``split`` is neither "dp" nor "all".
        """
        if split not in ("dp", "all"):
            raise ValueError(f"split is '{split}'; expected 'dp' or 'all'.")
        if method == "generate":
            return self._generate(plain["requests"])
        self.before(self.role, method)
        slices, count = self.slices, len(self.slices)
        merge: Merge = merge_plain
        batches: Sequence[Batch | None] = [batch] * count
        arguments = [plain] * count
        if batch is not None and split == "dp":
            batches, merge = split_batch(batch, count, self.attention)
        elif method in ONE_BY_ONE:
            self.running.forget(plain.get("dropped", ()))
            shares, merge = self.running.share(plain.get("requests", ())), self.running.merge
            if "requests" in plain:
                nothing = {**plain, "requests": []}
                arguments = [{**plain, "requests": share} if share else nothing for share in shares]
            if method == "advance" and not (plain.get("dropped") or plain.get("stopped")):
                busy = [at for at, requests in enumerate(self.running.under_way) if requests] or [0]
                slices, arguments = [slices[at] for at in busy], [arguments[at] for at in busy]
                batches = batches[: len(busy)]
        number = self.crew.next_number()
        messages: dict[int, Encoded] = {}
        texts: Texts = {}
        encoded: dict[tuple[int, int], Encoded] = {}  # one encoding for all ranks with the same arguments
        for at, rows, given in zip(slices, batches, arguments, strict=True):
            same = id(rows), id(given)
            if same not in encoded:
                encoded[same] = message_to(
                    number, "call", texts, role=self.role, method=method, batch=rows, plain=given
                )
            messages |= dict.fromkeys(at.ranks, encoded[same])
        return self.crew.send(
            messages,
            (self.role, method),
            number,
            leaders=[at.leader for at in slices],
            merge=merge,
            interruptible=self.independent and method in LEFT_AT_ONCE,
        )

    def stream(self, requests: Sequence[Request]) -> Generator[list[Rollout], None, None]:
        """Sample all requests; yield rollouts as they arrive.

        The call's error is raised here. A caller that stops early cancels the call.
        """
        parts: queue.SimpleQueue[list[Rollout] | None] = queue.SimpleQueue()
        prompts = {request.id: request.prompt for request in requests}
        reply = self._generate(requests, parts.put)
        reply.add_done_callback(lambda _: parts.put(None))
        try:
            while (part := parts.get()) is not None:
                for rollout in part:
                    rollout.prompt = prompts[rollout.request_id]  # the controller's object, not a copy
                yield part
            if rest := reply.result():
                yield rest
        except BaseException:
            if isinstance(reply, Reply):
                reply.give_up()
            raise

    def flow(self, tell: Callable[[list[Rollout]], None], changed: Callable[[], None]) -> Flow | None:
        """Return a flow if every slice is one independent rank, else None."""
        alone = self.independent and all(len(one.ranks) == 1 for one in self.slices)
        return Flow(self, tell, changed) if alone else None  # the ranks of one engine must run the same calls

    def _generate(
        self, requests: Sequence[Request], on_part: Callable[[list[Rollout]], None] | None = None
    ) -> Future[Any]:
        """Sample all requests; rollouts that were passed to ``on_part`` are not in the result."""
        self.before(self.role, "generate")
        count = len(self.slices)
        if 0 < self.capacity * count < len(requests) and count > 1:
            send = functools.partial(self._send, on_part=on_part)
            return Portions(portions_of(requests, self.capacity), count, send, in_order(requests)).reply
        shares, merge = split_requests(requests, count)
        number = self.crew.next_number()
        messages: dict[int, Encoded] = {}
        texts: Texts = {}  # a group's requests go to several samplers
        for at, share in zip(self.slices, shares, strict=True):
            messages |= dict.fromkeys(at.ranks, self._message(number, share, on_part is not None, texts))
        return self.crew.send(
            messages,
            (self.role, "generate"),
            number,
            leaders=[at.leader for at in self.slices],
            merge=merge,
            interruptible=self.independent,
            on_part=on_part or _nobody,
        )

    def _send(
        self, at: int, requests: list[Request], on_part: Callable[[list[Rollout]], None] | None
    ) -> Future[Any]:
        """Have one slice sample the requests."""
        number, chosen = self.crew.next_number(), self.slices[at]
        return self.crew.send(
            dict.fromkeys(chosen.ranks, self._message(number, requests, on_part is not None, {})),
            (self.role, "generate"),
            number,
            leaders=[chosen.leader],
            interruptible=self.independent,
            on_part=on_part or _nobody,
        )

    def _message(self, number: int, requests: Sequence[Request], parts: bool, texts: Texts) -> Encoded:
        plain = {"requests": list(requests)}
        return message_to(
            number, "call", texts, role=self.role, method="generate", batch=None, plain=plain, parts=parts
        )


def _nobody(part: Any) -> None:
    """Ignore a part of a result: the default of ``on_part``."""
