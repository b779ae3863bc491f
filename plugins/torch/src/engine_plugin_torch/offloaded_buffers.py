"""Offloading of device memory by whole storages.

A library may keep several lists of views of the same large buffers. Only the memory below the views is freed and
restored, so every view stays valid and the library needs no change.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class OffloadedBuffers:
    """Blocks of device memory that are freed for a while, with or without a copy in host memory."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    def put(self, tensors: Iterable[Tensor], keep: bool = True) -> None:
        """Free the memory of these tensors. Memory that cannot be resized, such as that of a mapped file, stays.

        Args:
            tensors: tensors of any shape ``[D0, ...]``; views of one storage count once.
            keep: copy the content to host memory; without a copy, the tensors are restored as zeros.
        """
        seen = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if not size or not storage.resizable() or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            copy = None
            if keep:
                pinned = storage.device.type == "cuda"
                copy = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).copy_(_bytes(storage))
            self._kept.append((storage, size, copy))
        for storage, _, _ in self._kept:
            storage.resize_(0)

    def back(self) -> None:
        """Allocate the memory again and restore its content."""
        for storage, size, copy in self._kept:
            storage.resize_(size)
            held = _bytes(storage)
            held.zero_() if copy is None else held.copy_(copy, non_blocking=True)
        if any(storage.device.type == "cuda" for storage, _, _ in self._kept):
            torch.accelerator.synchronize()
        self._kept.clear()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
