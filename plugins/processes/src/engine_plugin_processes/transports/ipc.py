"""Weights through the memory of a GPU (CUDA IPC); headers over a socket to each receiver.

The transport works between processes of one machine, even if they share a GPU, which NCCL refuses. The sender fills two
buffers in turn, and refills a buffer when every receiver has confirmed its copy. If a process does not see the sender's
GPU, or nothing is on a GPU, the bytes go over the sockets, as with ``tcp``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine_core.errors import ConfigError
from engine_plugin_processes.channel import Closed
from engine_plugin_processes.codec import encode
from engine_plugin_processes.transports.bucketing import Buffer, flat_buckets
from engine_plugin_processes.transports.choice import gpu_uuid, visible_gpus
from engine_plugin_processes.transports.tcp import TCP

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.contracts.weight_transport import TransportEndpoint, WeightUpdate
    from engine_core.specs import Options
    from engine_plugin_processes.channel import Channel

log = logging.getLogger("engine")


class SharedBuffer(Buffer):
    """A buffer on a CUDA device of this process, with a CUDA IPC handle for each receiver."""

    def __init__(self, device: torch.device, receivers: int) -> None:
        super().__init__(device)
        self.receivers = receivers
        self.handles: list[list[Any]] = []

    def take(self, size: int) -> Tensor:
        """Return the first ``size`` bytes, [SIZE] uint8; a buffer that grows changes its handles."""
        grows, found = size > len(self.bytes), super().take(size)
        if grows:
            storage = self.bytes.untyped_storage()
            self.handles = [list(storage._share_cuda_()) for _ in range(self.receivers)]
        return found


class IPC(TCP):
    """The transport ``ipc``: buffers shared by the sender and all receivers."""

    buffers: Sequence[SharedBuffer] = ()  # of the sender
    on_device = False
    source = torch.device("cpu")  # the sender's GPU, by its index in this process

    def __init__(self, options: Options, endpoint: TransportEndpoint) -> None:
        super().__init__(options, endpoint)
        self._opened: dict[int, tuple[Any, Tensor]] = {}  # buffer -> its handle, and its bytes [SIZE] uint8

    @classmethod
    def check(cls, options: Any, one_machine: bool) -> None:
        """Raise unless all processes run on one machine.

        Raises:
            ConfigError: as above.
        """
        if not one_machine:
            raise ConfigError(
                "rollout.transport: got 'ipc', which needs a run that has started all its processes itself, on one machine. "
                "Use 'broadcast', 'tcp' or 'auto'."
            )

    def open(self) -> Any:
        """Return this endpoint's address, its GPU, the GPUs that it sees, and whether its GPU memory can be shared."""
        device = self.endpoint.device
        return {
            "listens": super().open(),
            "gpu": gpu_uuid(device),
            "sees": visible_gpus() if device.type == "cuda" else [],
            "shares": self.endpoint.index > 0 or shares_device(device),
        }

    def join(self, peers: Sequence[Any]) -> None:
        """Keep the receivers' addresses; use the sender's GPU memory if every receiver sees that GPU."""
        super().join([each["listens"] for each in peers])
        gpu = peers[0]["gpu"]
        self.on_device = (
            bool(gpu) and peers[0]["shares"] and all(each["gpu"] and gpu in each["sees"] for each in peers)
        )
        if self.on_device:
            self.source = torch.device("cuda", visible_gpus().index(gpu))

    def send(self, stream: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> int:
        """Copy weights [D_1, D_2, ...] to the shared buffers, bucket by bucket; return their bytes."""
        if not self.on_device:
            return super().send(stream, update)
        sent, waiting, count = 0, False, len(self.addresses)
        self.buffers = self.buffers or [SharedBuffer(self.source, count) for _ in range(2)]
        with self._connected(update) as channels:
            for flat in flat_buckets(stream, self.source, self.buffers):
                header, handles = flat.header(update), self.buffers[flat.number % 2].handles
                messages = [encode({**header, "memory": handle}) for handle in handles]
                self._to_all(channels, messages, update)
                sent += flat.weight_bytes
                if waiting:  # for the other buffer, which is filled next
                    self._all_have(channels, update)
                waiting = True
            if waiting:
                self._all_have(channels, update)
            self._end(channels, update)
        return sent

    def close(self) -> None:
        """Close the socket and release the shared memory."""
        super().close()
        self.buffers, self._opened = (), {}

    def _data(self, message: Any, update: WeightUpdate) -> Tensor:
        """Return the bytes of a bucket; those of a GPU's buffer as a copy on this endpoint's device."""
        if not self.on_device:
            return super()._data(message, update)
        try:
            shared = self._memory(message["bucket"] % 2, message["memory"])
            return shared[: message["size"]].to(self.endpoint.device, copy=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise self.endpoint.failure(
                update,
                f"the memory of the sender cannot be seen here: {error}. Use rollout.transport = 'tcp'.",
            ) from error

    def _took(self, channel: Channel, number: int, update: WeightUpdate) -> None:
        if not self.on_device:
            return
        try:
            channel.send({"taken": number})
        except Closed as error:
            raise self._broken(error, update, "the next bucket did not come") from error

    def _memory(self, number: int, handle: Any) -> Tensor:
        """Return the opened memory of a buffer, [SIZE] uint8; open it again if its handle has changed."""
        if number not in self._opened or self._opened[number][0] != handle:
            self._opened.pop(number, None)  # first: it frees the old memory
            opened = torch.UntypedStorage._new_shared_cuda(self.source.index or 0, *handle[1:])
            memory = torch.empty(0, dtype=torch.uint8, device=self.source).set_(opened)
            self._opened[number] = handle, memory
        return self._opened[number][1]


def shares_device(device: torch.device) -> bool:
    """Return whether a buffer on this device can be shared with another process."""
    if device.type != "cuda":
        return False
    try:
        SharedBuffer(device, 1).take(1024)
    except RuntimeError as error:  # expandable segments, a container without IPC
        log.warning(
            "GPU memory cannot be shared with the sampler's process (%s); weights go over a socket, which is slower. "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is a common cause.",
            str(error).split("\n")[0],
        )
        return False
    return True
