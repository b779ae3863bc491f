"""Weights between pools, as the controller sees it: senders, receivers and the transport between them.

A link is made when it is first needed, and again after a failed update. It joins the first rank of the sending pool
with all ranks of the receiving pool. The other sending ranks take part in the stream, which is collective.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.contracts.weight_sync import SyncResult
from engine_core.errors import TrainingFailed, WorkerLost
from engine_plugin_processes.worker_pool import WorkerPool, message_to

if TYPE_CHECKING:
    from engine_core.contracts.weight_transport import WeightTransport
    from engine_plugin_processes.placement import Pool

WORD_SECONDS = 10.0  # for the other side to report its failure, once one has failed
LOSS_SECONDS = 10.0  # to detect the loss of a replaceable process, once an update has failed

log = logging.getLogger("engine")


@dataclass
class Link:
    """A link that is joined."""

    number: int  # in the run
    ranks: tuple[int, ...]  # of the run: the sender, then the receivers
    updates: int = 0  # so far


class Links:
    """The links of a run.

    Args:
        crew: all workers.
        transport_of: returns the name of the transport from one pool to another.
        ranks_of: returns the connected ranks of a pool.
        hosts: address at which each rank is reached.
        meeting: returns a rendezvous for the processes of a link, by name.
        token: the run's token.
    """

    def __init__(
        self,
        crew: WorkerPool,
        transport_of: Callable[[Pool, Pool], str],
        ranks_of: Callable[[Pool], Sequence[int]],
        hosts: Mapping[int, str],
        meeting: Callable[[str], Mapping[str, Any]],
        token: str,
    ) -> None:
        self.crew, self.transport_of, self.ranks_of, self.hosts = crew, transport_of, ranks_of, hosts
        self.meeting = meeting
        # identifies the run if several runs share a folder
        self._run = hashlib.sha256(token.encode()).hexdigest()[:12]
        self._open: dict[tuple[str, str], Link] = {}
        self._used: dict[tuple[str, str], list[int]] = {}  # numbers of links that have failed
        self._made = 0
        self.replaceable = False  # whether receivers may be lost one by one

    def push(
        self, source: Pool, target: Pool, roles: tuple[str, str], version: int, mix: float | None, merge: Any
    ) -> SyncResult:
        """Send a role's weights to every rank of another pool; retry without receivers that were lost.

        Args:
            source: pool that sends.
            target: pool that receives.
            roles: the sending role, the receiving role.
            version: the new policy version.
            mix: share of the new weights, if they are mixed into a model; None: they replace a sampler's.
            merge: merges the ranks' checksums into one.

        Raises:
            TrainingFailed: the update failed, and not because a replaceable receiver was lost.
        """
        start = time.perf_counter()
        while True:
            link: Link | None = None
            before = set(self.ranks_of(target))  # connected ranks alone
            try:
                link = self._link(source, target)
                moved, checksum = self._update(link, source, roles, version, mix, merge)
            except TrainingFailed:
                self.drop(source, target)
                if not self._goes_on(target, set(link.ranks[1:]) if link is not None else before):
                    raise
                log.warning(
                    "The update to policy version %d is sent again to the remaining receivers.", version
                )
            except BaseException:
                self.drop(source, target)
                raise
            else:
                receivers = [rank for rank in link.ranks[1:] if rank not in self.crew.absent]
                return SyncResult(version, moved * len(receivers), time.perf_counter() - start, checksum)

    def _update(
        self, link: Link, source: Pool, roles: tuple[str, str], version: int, mix: float | None, merge: Any
    ) -> tuple[int, str]:
        """Run one update over a link; return its bytes and the receivers' checksum."""
        link.updates += 1
        fields = {"link": link.number, "update": link.updates, "version": version, "mix": mix}
        what = roles[1], "update_weights"
        taken = self._tell(link.ranks[1:], "receive", what, merge, **fields, role=roles[1])
        number = self.crew.next_number()
        messages = {}
        for rank in source.ranks:
            own = fields if rank == link.ranks[0] else fields | {"link": None}
            messages[rank] = message_to(number, "send", **own, role=roles[0])
        sent = self.crew.send(messages, (roles[0], "named_weights"), number, leaders=link.ranks[:1])
        return self._both(sent, taken)

    def _goes_on(self, target: Pool, before: set[int]) -> bool:
        """Return whether an update failed because a receiver was lost, and the run continues without it.

        Args:
            target: pool that receives.
            before: the receivers of the update.
        """
        deadline = time.monotonic() + LOSS_SECONDS
        while self.crew.broken is None and time.monotonic() < deadline:
            if not before <= set(self.ranks_of(target)):
                return True
            if not self.replaceable:
                return False
            time.sleep(0.05)
        return False

    def drop(self, source: Pool, target: Pool) -> None:
        """Discard the link between two pools, after a failed update or when its members have changed."""
        key = source.name, target.name
        if (link := self._open.pop(key, None)) is not None:
            self._used.setdefault(key, []).append(link.number)

    def _link(self, source: Pool, target: Pool) -> Link:
        """Return the open link, or a new one: every endpoint is opened, then all are joined."""
        key = source.name, target.name
        if key in self._open and set(self._open[key].ranks[1:]) != set(self.ranks_of(target)):
            self.drop(source, target)  # its members have changed
        if key in self._open:
            return self._open[key]
        self._made += 1
        link = Link(self._made, (source.ranks[0], *self.ranks_of(target)))
        workers = [self.crew.workers[rank] for rank in link.ranks]
        role = {rank: source.roles[0] if rank == link.ranks[0] else target.roles[0] for rank in link.ranks}
        fields = {
            "transport": self.transport_of(source, target), "link_id": f"{self._run}-{link.number}",
            "names": [f"{role[worker.rank]}[{worker.rank}] on {worker.host}" for worker in workers],
            "rendezvous": self.meeting(f"weights-{link.number}"),
        }  # fmt: skip
        endpoints = {
            rank: {**fields, "index": index, "host": self.hosts[rank]}
            for index, rank in enumerate(link.ranks)
        }
        join(self.crew, link.number, endpoints, self._used.get(key, []))
        self._open[key] = link
        self._used.pop(key, None)
        return link

    def _tell(self, ranks: Sequence[int], kind: str, what: tuple[str, str], merge: Any, **fields: Any) -> Any:
        number = self.crew.next_number()
        messages = dict.fromkeys(ranks, message_to(number, kind, **fields))
        return self.crew.send(messages, what, number, leaders=ranks, merge=merge)

    def _both(self, sent: Future[Any], taken: Future[Any]) -> tuple[int, str]:
        """Return the results of both sides; if one has failed, raise the most informative error."""
        done, _ = concurrent.futures.wait([sent, taken], return_when=concurrent.futures.FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            done, _ = concurrent.futures.wait([sent, taken], WORD_SECONDS)
            errors = [error for future in (taken, sent) if future in done and (error := future.exception())]
            lost = [error for error in errors if isinstance(error, WorkerLost)]
            causes = [error for error in errors if not isinstance(error, TrainingFailed)]
            raise (lost or causes or errors)[0]  # a transport reports a failure of the other side
        return sent.result(), taken.result()


def join(
    crew: WorkerPool,
    number: int,
    endpoints: Mapping[int, Mapping[str, Any]],
    instead_of: Sequence[int],
    own: WeightTransport | None = None,
) -> None:
    """Open all endpoints of a link, then join them.

    Args:
        crew: the workers of the endpoints.
        number: the link's number.
        endpoints: fields of each rank's ``TransportEndpoint``, in the order of their index.
        instead_of: numbers of the links that this one replaces.
        own: the sender's endpoint, if the sender is this process.
    """

    def each(kind: str, fields: Mapping[int, Mapping[str, Any]]) -> list[Any]:
        """Send every rank its command; return the answers in the order of the ranks."""
        command, ranks = crew.next_number(), list(fields)
        messages = {rank: message_to(command, kind, link=number, **fields[rank]) for rank in ranks}
        answers: list[Any] = crew.send(
            messages, ("worker", kind), command, leaders=ranks, merge=list
        ).result()
        return answers

    peers = [own.open()] if own is not None else []
    fields = {rank: {"endpoint": one, "instead_of": instead_of} for rank, one in endpoints.items()}
    peers += each("link", fields)
    each("join", {rank: {"peers": peers} for rank in endpoints})
    if own is not None:
        own.join(peers)
