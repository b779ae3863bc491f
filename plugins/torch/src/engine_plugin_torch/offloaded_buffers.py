"""Device memory given back and taken again, whole blocks at a time.

What a library keeps of a model are views of large buffers, in several lists of its own. What is moved is the memory below them, so
that every view stays what it was, and the library need not know.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class OffloadedBuffers:
    """Blocks of device memory that lie in host memory, or nowhere, for a while."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    def put(self, tensors: Iterable[Tensor], keep: bool = True) -> None:
        """Free the memory of these tensors. Some cannot be freed, as that of a file which is mapped: it stays.

        Args:
            keep: a copy is kept in host memory; without it they come back as zeros.
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
        """Take the memory again, with what it held."""
        for storage, size, copy in self._kept:
            storage.resize_(size)
            held = _bytes(storage)
            held.zero_() if copy is None else held.copy_(copy, non_blocking=True)
        if any(storage.device.type == "cuda" for storage, _, _ in self._kept):
            torch.accelerator.synchronize()
        self._kept.clear()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
