"""Weights through shared memory of a GPU (CUDA IPC) or of the host; headers over a socket to each receiver.

The sockets are in the run's private folder. The transport works between processes of one machine, even if they share a
GPU, which NCCL refuses. The sender fills two buffers in turn, and refills a buffer when every receiver has confirmed
its copy. The buffers are on the sender's GPU if every receiver sees that GPU; otherwise they are anonymous memory
files.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine_core.errors import ConfigError
from engine_plugin_processes.channel import Closed
from engine_plugin_processes.codec import encode
from engine_plugin_processes.sampler_process.memory import (
    DeviceMemory,
    HostMemory,
    OpenedMemory,
    shares_device,
)
from engine_plugin_processes.transports.bucketing import flat_buckets, weight_bytes
from engine_plugin_processes.transports.devices import gpu_uuid, visible_gpus
from engine_plugin_processes.transports.tcp import TCP

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.contracts.weight_transport import TransportEndpoint, WeightUpdate
    from engine_core.specs import Options
    from engine_plugin_processes.channel import Channel


MAX_SOCKET_PATH = 100  # bytes of the path of a socket that every system takes


class IPC(TCP):
    """The transport ``ipc``: buffers shared by the sender and all receivers."""

    buffers: tuple[Any, Any] | None = None  # of the sender
    on_device = False
    source = torch.device("cpu")  # the sender's GPU, by its index in this process

    def __init__(self, options: Options, endpoint: TransportEndpoint) -> None:
        super().__init__(options, endpoint)
        self._opened: dict[int, tuple[Any, Any]] = {}  # buffer -> its path or handle, and the open memory

    @classmethod
    def check(cls, options: Any, one_machine: bool) -> None:
        """Raise unless all processes run on one machine with Linux.

        Raises:
            ConfigError: as above.
        """
        if not one_machine or not Path("/proc/self/fd").is_dir():
            raise ConfigError(
                "rollout.transport: got 'ipc', which needs a run that has started all its processes itself, on one machine with "
                "Linux. Use 'broadcast', 'tcp', 'folder' or 'auto'."
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
        channels: list[Channel] = []
        sent = waiting = 0
        self.buffers = self.buffers or (self._buffer(), self._buffer())
        try:
            for index, address in enumerate(self.addresses, 1):
                channels.append(self._connected(address, index, update))
            for flat in flat_buckets(stream, self.source, self.buffers):
                shown = self.buffers[flat.number % 2]
                for index, channel in enumerate(channels, 1):
                    message = {**flat.header(update), "memory": shown.told_to(index - 1)}
                    self._to_one(channel, index, encode(message), update)
                sent += weight_bytes(flat.bucket)
                waiting += 1
                if waiting > 1:  # the other buffer is filled next
                    self._all_have(channels, update)
                    waiting -= 1
            if waiting:
                self._all_have(channels, update)
            self._to_all(channels, encode({"end": True}), update)
            self._all_have(channels, update)
        finally:
            for channel in channels:
                channel.close()
        return sent

    def _place(self) -> str:
        folder = self.endpoint.shared_folder
        path = f"{folder}/{self.endpoint.link_id}-{self.endpoint.index}"
        usable = folder and hasattr(socket, "AF_UNIX") and len(os.fsencode(path)) < MAX_SOCKET_PATH
        return path if usable else self.endpoint.host

    def close(self) -> None:
        """Close the socket and release the shared memory."""
        super().close()
        opened = [memory for _, memory in self._opened.values()]
        for memory in (*(self.buffers or ()), *opened):
            memory.close()
        self.buffers, self._opened = None, {}

    def _buffer(self) -> Any:
        return (
            DeviceMemory(self.source, len(self.addresses))
            if self.on_device
            else HostMemory(HostMemory.new_file())
        )

    def _all_have(self, channels: Sequence[Channel], update: WeightUpdate) -> None:
        for index, channel in enumerate(channels, 1):
            self._taken(channel, index, update)

    def _data(self, message: Any, update: WeightUpdate) -> Tensor:
        """Return a copy of the bucket: on this endpoint's device if the buffers are on a GPU, else on the CPU."""
        try:
            memory = self._memory(message["bucket"] % 2, message["memory"])
            shown: Tensor = memory.view(0, message["size"])
            return shown.to(self.endpoint.device if self.on_device else "cpu", copy=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise self.endpoint.failure(
                update,
                f"the memory of the sender cannot be seen here: {error}. Use rollout.transport = 'tcp'.",
            ) from error

    def _took(self, channel: Channel, number: int, update: WeightUpdate) -> None:
        try:
            channel.send({"taken": number})
        except Closed as error:
            raise self._broken(error, update, "the next bucket did not come") from error

    def _memory(self, number: int, location: Any) -> Any:
        """Return the opened memory of a buffer; open it again if its path or handle has changed."""
        known, memory = self._opened.get(number, (None, None))
        if known != location:
            if memory is not None:
                memory.close()
            if self.on_device:
                memory = OpenedMemory(self.source, location["handle"])
            else:
                memory = HostMemory(os.open(location["path"], os.O_RDWR))
            self._opened[number] = location, memory
        return memory
