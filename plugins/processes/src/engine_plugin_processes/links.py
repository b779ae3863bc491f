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
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_core.contracts.weight_sync import SyncResult
from engine_core.errors import TrainingFailed, WorkerLost

if TYPE_CHECKING:
    from engine_core.contracts.weight_transport import WeightTransport
    from engine_plugin_processes.placement import Pool
    from engine_plugin_processes.replacement import Replacements
    from engine_plugin_processes.worker_pool import WorkerPool
    from engine_plugin_processes.worker_process import WorkerHandle

WORD_SECONDS = 10.0  # for the other side to report its failure, once one has failed

log = logging.getLogger("engine")


@dataclass
class Link:
    """A link that is joined."""

    name: str  # in the workers; a new link replaces the old one of its name
    workers: list[
        WorkerHandle
    ]  # the sender, then the receivers; a process that was replaced has another handle
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
        replacements: replaces lost receivers; None: none may be lost.
    """

    def __init__(
        self,
        crew: WorkerPool,
        transport_of: Callable[[Pool, Pool], str],
        ranks_of: Callable[[Pool], Sequence[int]],
        hosts: Mapping[int, str],
        meeting: Callable[[str], Mapping[str, Any]],
        token: str,
        replacements: Replacements | None = None,
    ) -> None:
        self.crew, self.transport_of, self.ranks_of, self.hosts = crew, transport_of, ranks_of, hosts
        self.meeting, self.replacements = meeting, replacements
        # identifies the run if several runs share a folder
        self._run = hashlib.sha256(token.encode()).hexdigest()[:12]
        self._open: dict[str, Link] = {}
        self._made = 0

    def push(
        self, source: Pool, target: Pool, roles: tuple[str, str], version: int, mix: float | None
    ) -> SyncResult:
        """Send a role's weights to every rank of another pool; retry without receivers that were lost.

        Args:
            source: pool that sends.
            target: pool that receives.
            roles: the sending role, the receiving role.
            version: the new policy version.
            mix: share of the new weights, if they are mixed into a model; None: they replace a sampler's.

        Raises:
            TrainingFailed: the update failed, and not because a replaceable receiver was lost.
        """
        start, name = time.perf_counter(), f"{source.name} to {target.name}"
        while True:
            receivers = list(self.ranks_of(target))  # connected ranks alone
            try:
                link = self._link(name, source, target, receivers)
                moved, checksum = self._update(link, source, roles, version, mix)
            except BaseException as error:
                self._open.pop(name, None)
                if not isinstance(error, TrainingFailed) or self.replacements is None:
                    raise
                if not self.replacements.lost_one_of(receivers):
                    raise
                log.warning(
                    "The update to policy version %d is sent again to the remaining receivers.", version
                )
            else:
                count = sum(rank not in self.crew.absent for rank in receivers)
                return SyncResult(version, moved * count, time.perf_counter() - start, checksum)

    def _update(
        self, link: Link, source: Pool, roles: tuple[str, str], version: int, mix: float | None
    ) -> tuple[int, str]:
        """Run one update over a link; return its bytes and the receivers' checksum."""
        link.updates += 1
        sender, *receivers = (worker.rank for worker in link.workers)
        fields = {"link": link.name, "update": link.updates, "version": version, "mix": mix}
        receive = {"kind": "receive", "role": roles[1], **fields}
        what, one = (roles[1], "update_weights"), partial(one_checksum, roles[1])
        taken = self.crew.send(dict.fromkeys(receivers, receive), what, leaders=receivers, merge=one)
        send = {"kind": "send", "role": roles[0], **fields}
        messages = dict.fromkeys(source.ranks, send | {"link": None}) | {sender: send}
        return self._both(self.crew.send(messages, (roles[0], "named_weights"), leaders=[sender]), taken)

    def _link(self, name: str, source: Pool, target: Pool, receivers: Sequence[int]) -> Link:
        """Return the open link, or a new one if its members have changed: every endpoint is opened, then all are joined."""
        workers = [self.crew.workers[rank] for rank in (source.ranks[0], *receivers)]
        if name in self._open and self._open[name].workers == workers:
            return self._open[name]
        self._made += 1
        roles = [source.roles[0], *[target.roles[0]] * len(receivers)]
        fields = {
            "transport": self.transport_of(source, target), "link_id": f"{self._run}-{self._made}",
            "names": [f"{role}[{at.rank}] on {at.host}" for role, at in zip(roles, workers, strict=True)],
            "rendezvous": self.meeting(f"weights-{self._made}"),
        }  # fmt: skip
        endpoints = {
            worker.rank: {**fields, "index": index, "host": self.hosts[worker.rank]}
            for index, worker in enumerate(workers)
        }
        join(self.crew, name, endpoints)
        self._open[name] = Link(name, workers)
        return self._open[name]

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
    name: str,
    endpoints: Mapping[int, Mapping[str, Any]],
    own: WeightTransport | None = None,
) -> str:
    """Open all endpoints of a link, then join them.

    Args:
        crew: the workers of the endpoints.
        name: the link's name; a worker closes its endpoint of an earlier link of this name.
        endpoints: fields of each rank's ``TransportEndpoint``, in the order of their index.
        own: the sender's endpoint, if the sender is this process; else the sender is the first of ``endpoints``.

    Returns:
        The name of ``weight_dtype`` of the receivers' samplers; "" if it is unknown or they differ.
    """
    ranks = list(endpoints)
    messages = {rank: {"kind": "link", "link": name, "endpoint": one} for rank, one in endpoints.items()}
    peers = [own.open()] if own is not None else []
    opened = crew.send(messages, ("worker", "link"), leaders=ranks, merge=list).result()
    peers += [address for address, _ in opened]
    dtypes = {dtype for _, dtype in opened[0 if own is not None else 1 :]}
    dtype: str = dtypes.pop() if len(dtypes) == 1 else ""
    message = {"kind": "join", "link": name, "peers": peers, "weight_dtype": dtype}
    joined = crew.send(dict.fromkeys(ranks, message), ("worker", "join"), leaders=ranks, merge=list)
    joined.result()
    if own is not None:
        own.join(peers)
    return dtype


def one_checksum(target: str, checksums: Sequence[str]) -> str:
    """Return the checksum of all ranks.

    Raises:
        TrainingFailed: the ranks have different weights.
    """
    if len(set(checksums)) > 1:
        listed = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(checksums))
        raise TrainingFailed(
            f"The ranks of '{target}' have received different weights ({listed}). The train engine must stream the "
            "same tensors on every rank."
        )
    return checksums[0]
