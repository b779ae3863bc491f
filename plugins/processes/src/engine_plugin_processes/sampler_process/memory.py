"""Memory that a sampler's owner and its process both see: a file without a name, or two buffers of one GPU.

Nothing has a name that another process could open, and nothing is left when both have ended.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine_plugin_processes.buckets import Arena

log = logging.getLogger("engine")


class HostMemory:
    """A file in memory, by its descriptor; grows, and keeps what lies in it.

    Args:
        descriptor: of ``new_file`` here, or as inherited.
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

    def told(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        os.close(self.descriptor)


class DeviceMemory:
    """One buffer on a CUDA device, whose handle the other process opens (CUDA IPC).

    Args:
        device: of the buffer.
        handle: as ``told`` by the side that made it; None: this is that side.
    """

    def __init__(self, device: torch.device, handle: list[Any] | None = None) -> None:
        self.device = device
        self._handle: list[Any] = handle or []
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        if handle is not None:
            opened = torch.UntypedStorage._new_shared_cuda(device.index or 0, *handle[1:])
            self._bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(opened)

    def reserve(self, size: int) -> None:
        if size > len(self._bytes):
            self._bytes = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self._handle = list(self._bytes.untyped_storage()._share_cuda_())

    def view(self, offset: int, size: int) -> Tensor:
        return self._bytes[offset : offset + size]

    def told(self) -> dict[str, Any]:
        return {"handle": self._handle}

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device)


class Seen:
    """The process's side: the arena that a message tells of. A device buffer is opened once.

    Args:
        host: of the inherited descriptor.
        device: of the engine.
    """

    def __init__(self, host: HostMemory, device: torch.device) -> None:
        self.host, self.device = host, device
        self._opened: DeviceMemory | None = None
        self._handle: list[Any] = []

    def __call__(self, told: Mapping[str, Any]) -> Arena:
        if "handle" not in told:
            return self.host
        if self._opened is None or told["handle"] != self._handle:
            self._handle = told["handle"]
            self._opened = DeviceMemory(self.device, self._handle)
        return self._opened


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
