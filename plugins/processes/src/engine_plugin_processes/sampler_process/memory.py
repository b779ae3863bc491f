"""Memory shared by several processes: an anonymous file or a GPU buffer, released when all processes have ended."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("engine")


class HostMemory:
    """A memory file of a descriptor; it can grow and keeps its contents.

    Args:
        descriptor: from ``new_file``, or opened by the path of another process's descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def new_file() -> int:
        """Return the descriptor of a new anonymous file, which the system frees with its last descriptor."""
        if hasattr(os, "memfd_create"):
            return os.memfd_create("engine-weights")
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())

    def reserve(self, size: int) -> None:
        """Make the file at least ``size`` bytes long."""
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, size)

    def view(self, offset: int, size: int) -> Tensor:
        """Return bytes ``offset`` to ``offset + size``, [SIZE] uint8, mapped from the file."""
        if offset + size > len(self._bytes):
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._bytes[offset : offset + size]

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class DeviceMemory:
    """A buffer on a CUDA device of this process, with a CUDA IPC handle for each receiver.

    Args:
        device: device of the buffer.
        receivers: number of processes that will open it.
    """

    def __init__(self, device: torch.device, receivers: int = 1) -> None:
        self.device, self.receivers = device, receivers
        self._handles: list[list[Any]] = []
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, size: int) -> None:
        """Make the buffer at least ``size`` bytes long; growing loses its contents and changes its handles."""
        if size > len(self._bytes):
            self._bytes = torch.zeros(size, dtype=torch.uint8, device=self.device)
            storage = self._bytes.untyped_storage()
            self._handles = [list(storage._share_cuda_()) for _ in range(self.receivers)]

    def view(self, offset: int, size: int) -> Tensor:
        """Return bytes ``offset`` to ``offset + size`` of the buffer, [SIZE] uint8."""
        return self._bytes[offset : offset + size]

    def handle(self, receiver: int) -> list[Any]:
        """Return the handle by which a receiver opens the buffer."""
        return self._handles[receiver]

    def close(self) -> None:
        """Release the buffer."""
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device)


class OpenedMemory:
    """A view of another process's ``DeviceMemory``.

    Args:
        device: device of the buffer, by its index in this process.
        handle: from ``DeviceMemory.handle``.
    """

    def __init__(self, device: torch.device, handle: Sequence[Any]) -> None:
        self._device = device
        opened = torch.UntypedStorage._new_shared_cuda(device.index or 0, *handle[1:])
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(opened)

    def view(self, offset: int, size: int) -> Tensor:
        """Return bytes ``offset`` to ``offset + size`` of the buffer, [SIZE] uint8."""
        return self._bytes[offset : offset + size]

    def close(self) -> None:
        """Release the view."""
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self._device)


def shares_device(device: torch.device) -> bool:
    """Return whether a buffer on this device can be shared with another process."""
    if device.type != "cuda":
        return False
    try:
        probe = DeviceMemory(device)
        probe.reserve(1024)
    except RuntimeError as error:  # expandable segments, a container without IPC
        log.warning(
            "GPU memory cannot be shared with the sampler's process (%s); weights go over a socket, which is slower. "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is a common cause.",
            str(error).split("\n")[0],
        )
        return False
    return True


def environment_for(device: torch.device) -> dict[str, str]:
    """Return the environment in which a process sees only this CUDA device, as device 0; {} for other devices."""
    if device.type != "cuda":
        return {}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": visible[device.index or 0]}
