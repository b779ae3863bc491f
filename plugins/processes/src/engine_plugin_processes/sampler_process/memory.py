"""Memory that several processes see: a file without a name, or a buffer of a GPU. Nothing is left when all have ended."""

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
    """A file in memory, by its descriptor; grows, and keeps what lies in it.

    Args:
        descriptor: of ``new_file`` here, or opened from ``told_to`` of another process.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def new_file() -> int:
        """A descriptor; the file ends with the last process that has it."""
        if hasattr(os, "memfd_create"):
            return os.memfd_create("engine-weights")
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())

    def reserve(self, size: int) -> None:
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, size)

    def view(self, offset: int, size: int) -> Tensor:
        if offset + size > len(self._bytes):
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._bytes[offset : offset + size]

    def told_to(self, receiver: int) -> dict[str, Any]:
        """Return how a process of the same user finds it: by this process's descriptor."""
        return {"path": f"/proc/{os.getpid()}/fd/{self.descriptor}"}

    def close(self) -> None:
        os.close(self.descriptor)


class DeviceMemory:
    """A buffer on a CUDA device of this process, with a handle for each receiver (CUDA IPC).

    Args:
        device: of the buffer.
        receivers: how many processes will open it.
    """

    def __init__(self, device: torch.device, receivers: int = 1) -> None:
        self.device, self.receivers = device, receivers
        self._handles: list[list[Any]] = []
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, size: int) -> None:
        if size > len(self._bytes):
            self._bytes = torch.zeros(size, dtype=torch.uint8, device=self.device)
            storage = self._bytes.untyped_storage()
            self._handles = [list(storage._share_cuda_()) for _ in range(self.receivers)]

    def view(self, offset: int, size: int) -> Tensor:
        return self._bytes[offset : offset + size]

    def told_to(self, receiver: int) -> dict[str, Any]:
        """Return how a receiver finds it."""
        return {"handle": self._handles[receiver]}

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device)


class OpenedMemory:
    """The buffer of a ``DeviceMemory`` in a receiver.

    Args:
        device: the buffer's, by its number in this process.
        handle: as ``DeviceMemory.told_to`` returned it.
    """

    def __init__(self, device: torch.device, handle: Sequence[Any]) -> None:
        self._device = device
        opened = torch.UntypedStorage._new_shared_cuda(device.index or 0, *handle[1:])
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(opened)

    def view(self, offset: int, size: int) -> Tensor:
        return self._bytes[offset : offset + size]

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self._device)


def shares_device(device: torch.device) -> bool:
    """Whether a buffer on this device can be shown to another process."""
    if device.type != "cuda":
        return False
    try:
        probe = DeviceMemory(device)
        probe.reserve(1024)
    except RuntimeError as error:  # expandable segments, a container without IPC
        log.warning(
            "GPU memory cannot be shared with the sampler's process (%s); weights go through host memory, which is slower. "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is a common cause.",
            str(error).split("\n")[0],
        )
        return False
    return True


def environment_for(device: torch.device) -> dict[str, str]:
    """What shows a process this CUDA device alone: it is number 0 there, as engines of one device expect."""
    if device.type != "cuda":
        return {}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": visible[device.index or 0]}
