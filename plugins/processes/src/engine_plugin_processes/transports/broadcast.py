"""Weights by broadcast: one process group over the sender and all receivers, gloo or, if all are on CUDA, NCCL.

The group is separate from ``torch.distributed``'s default groups, in which every pool is its own world. Each bucket
takes three broadcasts: two lengths, the header, the bytes. The next bucket is gathered while the last one is in
flight. Lengths and headers always go through host memory by gloo, so that a receiver's wait fails when the sender has
gone. Bytes go from device to device by NCCL where possible, and a kernel of NCCL starts only when the bytes are ready.
If processes share a GPU, bytes go by gloo, too.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine_core.contracts.weight_transport import WeightTransport, WeightUpdate
from engine_core.errors import TrainingFailed
from engine_plugin_processes.starting import store_at
from engine_plugin_processes.transports.bucketing import FlatBucket, flat_buckets, unpacked, verify
from engine_plugin_processes.transports.choice import gpu_uuid

MAX_HEADER_BYTES = 1 << 31
SPIN_SECONDS = 0.05  # a bucket takes a millisecond; a longer wait is for a slow peer
NAP_SECONDS = 0.001

log = logging.getLogger("engine")


class Broadcast(WeightTransport):
    """The transport ``broadcast``: a process group over the sender and all receivers."""

    group: Any = None  # gloo, for lengths and headers, and for bytes that go through host memory
    bytes_group: Any = None  # NCCL, for bytes between GPUs
    device = torch.device("cpu")

    def open(self) -> Any:
        """Return the UUID of this process's GPU; "" if NCCL cannot reach the device."""
        return gpu_uuid(self.endpoint.device) if dist.is_nccl_available() else ""

    def join(self, peers: Sequence[Any]) -> None:
        """Make the gloo group and, if every endpoint has its own GPU, the NCCL group."""
        seconds = datetime.timedelta(seconds=self.options.timeout_seconds)
        store = store_at(self.endpoint.rendezvous, len(peers), seconds)
        index, size = self.endpoint.index, len(peers)
        words = dist.PrefixStore(f"{self.endpoint.link_id}/words", store)
        self.group = dist.ProcessGroupGloo(words, index, size, seconds)
        if len(set(peers)) == size and all(peers):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = 2 * seconds  # then NCCL ends the process; this module's timeout expires before
            data = dist.PrefixStore(f"{self.endpoint.link_id}/bytes", store)
            self.bytes_group = dist.ProcessGroupNCCL(data, index, size, options)
            self.device = self.endpoint.device
        elif all(peers):
            log.warning(
                "rollout.transport = 'broadcast': processes share a GPU, so weights go through host memory."
            )

    def send(self, stream: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> int:
        """Broadcast weights [D_1, D_2, ...] in buckets; return their bytes.

        Raises:
            TrainingFailed: a broadcast failed or timed out.
            Exception: the stream's own error, after it was broadcast to every receiver.
        """
        sent = 0
        under_way: list[Any] = []
        try:
            for flat in flat_buckets(stream, self.device):
                self._wait(under_way, update)
                under_way = self._post(flat.header(update), flat, update)
                sent += flat.weight_bytes
            self._wait(under_way, update)
        except TrainingFailed:
            raise
        except BaseException as error:
            self._wait(under_way, update)
            self._wait(self._post({"break": f"{type(error).__name__}: {error}"}, None, update), update)
            raise
        self._wait(self._post({"end": True}, None, update), update)
        return sent

    def receive(self, update: WeightUpdate) -> Generator[tuple[str, Tensor], None, None]:
        """Yield the weights [D_1, D_2, ...] of an update; a caller that stops early drains the rest.

        Raises:
            TrainingFailed: the stream broke off, a broadcast failed, or a bucket is not the expected one.
        """
        over, expected = False, 0
        try:
            while True:
                header = self._header(update)
                over = "end" in header or "break" in header
                if "break" in header:
                    raise self.endpoint.failure(
                        update, f"The stream of weights broke off: {header['break']}."
                    )
                if over:
                    return
                data = self._payload(header, update)
                verify(self.endpoint, update, header, expected, data)
                expected += 1
                yield from unpacked(data, header["entries"])
        finally:
            if not over:
                self._drain(update)

    def close(self) -> None:
        """Free the groups. The NCCL group is aborted: what it still waits for does not come."""
        group, self.group, self.bytes_group = self.bytes_group, None, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    # -- one broadcast ------------------------------------------------------

    def _post(self, header: Mapping[str, Any], flat: FlatBucket | None, update: WeightUpdate) -> list[Any]:
        """Start the broadcasts of a header and of a bucket's bytes; return them with the tensors that they read."""
        words = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        lengths = torch.tensor([len(words), len(flat.data) if flat else 0])
        tensors = [lengths, words, *([flat.data] if flat and len(flat.data) else [])]
        return [(self._broadcast(tensor, update), tensor) for tensor in tensors]

    def _header(self, update: WeightUpdate) -> dict[str, Any]:
        lengths = self._taken(torch.zeros(2, dtype=torch.int64), update)
        header_bytes, size = lengths.tolist()
        if not 0 < header_bytes < MAX_HEADER_BYTES:
            raise self._unusable(update, f"a header of {header_bytes} bytes came, which is none of ours.")
        words = self._taken(torch.empty(header_bytes, dtype=torch.uint8), update)
        header: dict[str, Any] = json.loads(bytes(words.numpy()))
        return header | {"size": size}

    def _payload(self, header: Mapping[str, Any], update: WeightUpdate) -> Tensor:
        data = torch.empty(header["size"], dtype=torch.uint8, device=self.device)
        return self._taken(data, update) if header["size"] else data

    def _taken(self, tensor: Tensor, update: WeightUpdate) -> Tensor:
        self._wait([(self._broadcast(tensor, update), tensor)], update)
        return tensor

    def _broadcast(self, tensor: Tensor, update: WeightUpdate) -> Any:
        if self.group is None:
            raise self.endpoint.failure(update, "the group has failed before. This is a bug of the runtime.")
        try:
            group = self.group if tensor.device.type == "cpu" else self.bytes_group
            return group.broadcast(tensor, 0)
        except RuntimeError as error:
            raise self._unusable(update, _first_line(error)) from error

    def _wait(self, under_way: Sequence[Any], update: WeightUpdate) -> None:
        for work, tensor in under_way:
            try:
                if tensor.device.type != "cpu" and not _done(work, self.options.timeout_seconds):
                    raise self._unusable(update, "the bytes of a bucket timed out")
                work.wait()  # on a GPU its stream waits, not this process
            except RuntimeError as error:
                raise self._unusable(update, _first_line(error)) from error

    def _unusable(self, update: WeightUpdate, what: str) -> TrainingFailed:
        """Free the groups after a failed broadcast and return the error of this update."""
        self.close()
        if "imed out" in what:
            return self.endpoint.timeout(update, f"nothing went on ({what})", self.options.timeout_seconds)
        return self.endpoint.failure(update, f"{what}. 'tcp' needs nothing but sockets.")

    def _drain(self, update: WeightUpdate) -> None:
        """Receive and discard the rest, so that no endpoint waits for this one."""
        while self.group is not None:
            try:
                header = self._header(update)
                if "end" in header or "break" in header:
                    return
                self._payload(header, update)
            except TrainingFailed:
                return  # the sender has gone, too


def _done(work: Any, seconds: float) -> bool:
    """Return whether ``work`` on a GPU completes in that time; ``Work.wait`` with a timeout polls only every ms."""
    start = time.monotonic()
    while not work.is_completed():
        waited = time.monotonic() - start
        if waited > seconds:
            return False
        time.sleep(0.0 if waited < SPIN_SECONDS else NAP_SECONDS)
    return True


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
