"""Transfers between host and device without synchronization.

A step reads the lengths and the loss mask of a micro-batch from its copy in host memory. Reading them from the device
would wait for all queued kernels, and the device would then be idle until the next kernels are queued.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from engine_core.types import Batch

PINNED = frozenset({"cuda", "xpu"})  # devices that copy asynchronously from pinned host memory

_SOURCES = WeakTensorKeyDictionary()  # tensor on a device -> the host tensor that it was copied from


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor ``[D0, ...]`` to ``device``; the host does not wait for the copy."""
    if tensor.device.type != "cpu" or device.type not in PINNED:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def send_batch(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch from host memory to ``device``; ``on_host`` still finds its lengths and its loss mask."""
    moved = dataclasses.replace(
        batch,
        token_ids=send(batch.token_ids, device),
        lengths=send(batch.lengths, device),
        tokens={name: send(column, device) for name, column in batch.tokens.items()},
        sequences={name: send(column, device) for name, column in batch.sequences.items()},
        keep_together=None if batch.keep_together is None else send(batch.keep_together, device),
    )
    _remember(moved.lengths, batch.lengths)
    if "loss_mask" in batch:
        _remember(moved["loss_mask"], batch["loss_mask"])
    return moved


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor ``[D0, ...]`` in host memory, read-only: the source of ``send_batch``, else a blocking copy."""
    if tensor.device.type == "cpu":
        return tensor
    source: Tensor | None = _SOURCES.get(tensor, None)
    return tensor.cpu() if source is None else source


def predicted(pack: Batch) -> Tensor:
    """Return the positions [N], in host memory, of the loss tokens of a pack that have a token before them."""
    lengths, mask = on_host(pack.lengths), on_host(pack["loss_mask"]).clone()
    mask[(lengths.cumsum(0) - lengths)[lengths > 0]] = False  # nothing predicts a first token
    return mask.nonzero().squeeze(1)


class Fetched:
    """Asynchronous copies to host memory; call ``wait`` before reading them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a copy ``[D0, ...]`` in host memory, which the device fills later."""
        if tensor.device.type not in PINNED:
            return tensor.cpu()
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self.device.type in PINNED:
            torch.accelerator.synchronize(self.device)


def numbers(tensors: Iterable[Tensor], device: torch.device) -> list[float]:
    """Return the values of N scalar tensors, stacked to ``[N]`` and fetched with one wait for the device."""
    held = [tensor.detach().to(device) for tensor in tensors]
    kind = functools.reduce(torch.promote_types, (tensor.dtype for tensor in held), torch.float32)
    return torch.stack([tensor.to(kind) for tensor in held]).tolist() if held else []


def _remember(moved: Tensor, source: Tensor) -> None:
    if moved is not source:
        _SOURCES[moved] = source
