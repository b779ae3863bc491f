"""The weights of a sampler's processes, on the side of their owner: sent at each update, and again to a new process."""

from __future__ import annotations

import concurrent.futures
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine_core.contracts.weight_sync import rounded
from engine_core.contracts.weight_transport import TransportEndpoint, WeightTransport, WeightUpdate
from engine_core.errors import DataError, TrainingFailed
from engine_plugin_processes.channel import new_token
from engine_plugin_processes.codec import DTYPES
from engine_plugin_processes.links import WORD_SECONDS, join, one_checksum
from engine_plugin_processes.transports.table import TRANSPORTS

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.contracts.engines import WorkerContext
    from engine_plugin_processes.worker_pool import WorkerPool
    from engine_plugin_processes.worker_process import WorkerHandle

Stream = Iterable[tuple[str, "Tensor"]]

TRANSPORT, LINK = "ipc", "weights"


class Weights:
    """The current weights, and the link over which the processes receive them.

    Args:
        pool: of the sampler's processes.
        context: of the owner.
        source: streams the current weights again, for a process that is started again; None: a copy of each update is
            kept in host memory.
        again: a process may be started again; False: nothing is kept.
    """

    def __init__(
        self,
        pool: WorkerPool,
        context: WorkerContext,
        source: Callable[[], Stream] | None,
        again: bool,
    ) -> None:
        self.pool, self.context, self.source = pool, context, source
        self.token = new_token()
        self._keeps = source is None and again
        self._kept: list[tuple[str, Tensor]] = []  # of the last complete update
        self._version: int | None = None  # of the last complete update; None: the weights of the model folder
        self.known = True  # whether the stream of the last update came to its end, or there was none
        self.incomplete = ""  # why a process that is present may not have them
        # receivers, and the owner's endpoint
        self._link: tuple[list[WorkerHandle], WeightTransport] | None = None
        self._dtype: torch.dtype | None = None  # of the receivers' weights
        self._links = self._updates = 0  # so far

    def update(self, ranks: Sequence[int], stream: Stream, version: int) -> str:
        """Send an update, which becomes the current weights.

        Args:
            ranks: the receivers.
            stream: of the weights. It is run to its end, also if a receiver is lost.
            version: of these weights.

        Returns:
            The checksum of the receivers' engines.

        Raises:
            TrainingFailed: a receiver was lost (then ``again`` sends the update to the others), or does not receive it.
            Exception: the stream's own, or an engine's refusal: nothing is sampled until a complete update.
        """
        self.known, self.incomplete = False, f"an update to version {version} did not come to its end"
        copied = _Copied(stream, self._kept if self._keeps else None)
        tensors = iter(copied)
        try:
            found = self._send(ranks, tensors, version)
        except Exception as error:
            for _ in tensors:  # collective for the actor's ranks
                pass
            if copied.error is not None:
                raise copied.error from None
            if isinstance(error, TrainingFailed):
                self._kept, self._version, self.known = copied.kept, version, True
            raise
        self._kept, self._version = copied.kept, version
        self.known, self.incomplete = True, ""
        return found

    def again(self, ranks: Sequence[int]) -> str:
        """Send the current weights to other receivers; ``update`` describes result and errors.

        After an interruption nothing is sampled until the next complete update, as after an interrupted update.
        """
        if self._version is None:
            return ""
        self.incomplete = f"version {self._version} did not reach a process that was started again"
        if self.source is None and self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)  # the copies to the host have ended
        found = self._send(ranks, self._kept if self.source is None else self.source(), self._version)
        self.incomplete = ""
        return found

    def check_complete(self) -> None:
        """Refuse to sample from a mixture.

        Raises:
            DataError: a process may not have all of the current weights.
        """
        if self.incomplete:
            raise DataError(
                f"The sampler holds weights of two versions ({self.incomplete}). Update them again."
            )

    def close(self) -> None:
        """Close the owner's endpoint."""
        if self._link is not None:
            self._link[1].close()
            self._link = None

    def _send(self, ranks: Sequence[int], stream: Stream, version: int) -> str:
        transport = self._connected(ranks)
        self._updates += 1
        fields = {"link": LINK, "update": self._updates, "version": version, "mix": None}
        message = {"kind": "receive", "role": "rollout", **fields}
        taken = self.pool.send(
            dict.fromkeys(ranks, message),
            ("rollout", "update_weights"),
            leaders=ranks,
            merge=partial(one_checksum, "rollout"),
        )
        try:
            transport.send(rounded(stream, self._dtype), WeightUpdate(self._updates, version))
            checksum: str = taken.result()
        except BaseException as error:
            self.close()
            concurrent.futures.wait([taken], WORD_SECONDS)
            if isinstance(error, TrainingFailed) and taken.done() and (reason := taken.exception()):
                raise reason from error
            raise
        return checksum

    def _connected(self, ranks: Sequence[int]) -> WeightTransport:
        """Return the owner's endpoint of the link to these receivers; make a new link if needed."""
        workers = [self.pool.workers[rank] for rank in ranks]  # one that was replaced is another object
        if self._link is not None and self._link[0] == workers:
            return self._link[1]
        self.close()
        self._links += 1
        self._updates = 0
        host = socket.gethostname()
        names = (
            f"actor[{self.context.rank}] on {host}",
            *(f"{worker.name} on {host}" for worker in workers),
        )
        fields: dict[str, Any] = {
            "transport": TRANSPORT, "host": "127.0.0.1", "rendezvous": {}, "link_id": str(self._links), "names": names,
        }  # fmt: skip
        endpoint = TransportEndpoint(**fields, index=0, device=self.context.device, token=self.token)
        spec = TRANSPORTS[TRANSPORT]
        transport: WeightTransport = spec.resolve()(spec.config(), endpoint)
        endpoints = {rank: {**fields, "index": at} for at, rank in enumerate(ranks, 1)}
        try:
            self._dtype = DTYPES.get(join(self.pool, LINK, endpoints, transport))
        except BaseException:
            transport.close()
            raise
        self._link = workers, transport
        return transport


class _Copied:
    """A stream whose tensors are copied to host memory on their way.

    Args:
        stream: of weights.
        old: copies of an earlier update, whose memory is used again; None: copy nothing, so that ``kept`` stays empty.
    """

    def __init__(self, stream: Stream, old: Sequence[tuple[str, Tensor]] | None) -> None:
        self._stream, self._old = stream, old
        self.kept: list[tuple[str, Tensor]] = []
        self.error: Exception | None = None  # of the stream

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            for name, tensor in self._stream:
                if self._old is not None:
                    self.kept.append((name, self._copy(name, tensor.detach(), self._old)))
                yield name, tensor
        except Exception as error:
            self.error = error
            raise

    def _copy(self, name: str, tensor: Tensor, old: Sequence[tuple[str, Tensor]]) -> Tensor:
        """Return a copy on the host. From an accelerator it is made in stream order, without waiting for it."""
        at = len(self.kept)
        known, memory = old[at] if at < len(old) else ("", tensor)
        if known != name or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return memory.copy_(tensor, non_blocking=True)
