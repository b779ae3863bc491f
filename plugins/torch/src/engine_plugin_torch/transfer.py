"""Between host and device without waiting for either.

What a step needs to know of a micro-batch (lengths, which tokens are learned) it reads from the copy in host memory
that the micro-batch came from: asking the device would wait until it has done everything asked of it before, and it
would then stand still until the next kernels are there.
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

PINNED = frozenset({"cuda", "xpu"})  # devices that copy from pinned host memory while the host goes on

_SOURCES = WeakTensorKeyDictionary()  # tensor on a device -> the host tensor that it is a copy of


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on ``device``; the host does not wait for the copy."""
    if tensor.device.type != "cpu" or device.type not in PINNED:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def send_batch(batch: Batch, device: torch.device) -> Batch:
    """A batch in host memory on ``device``; ``on_host`` finds its lengths and its loss mask again."""
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
    """The values of a tensor in host memory, to be read only: the ones that ``send_batch`` sent, else a copy that waits."""
    if tensor.device.type == "cpu":
        return tensor
    source: Tensor | None = _SOURCES.get(tensor, None)
    return tensor.cpu() if source is None else source


def predicted(pack: Batch) -> Tensor:
    """[N] in host memory: the loss tokens of a pack that have a token before them."""
    lengths, mask = on_host(pack.lengths), on_host(pack["loss_mask"]).clone()
    mask[(lengths.cumsum(0) - lengths)[lengths > 0]] = False  # nothing predicts a first token
    return mask.nonzero().squeeze(1)


class Fetched:
    """Tensors on their way to host memory; ``wait`` before they are read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, which the device fills when it gets there."""
        if tensor.device.type not in PINNED:
            return tensor.cpu()
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Until all copies are there."""
        if self.device.type in PINNED:
            torch.accelerator.synchronize(self.device)


def numbers(tensors: Iterable[Tensor], device: torch.device) -> list[float]:
    """The values of scalars, fetched together: one wait for the device."""
    held = [tensor.detach().to(device) for tensor in tensors]
    kind = functools.reduce(torch.promote_types, (tensor.dtype for tensor in held), torch.float32)
    return torch.stack([tensor.to(kind) for tensor in held]).tolist() if held else []


def _remember(moved: Tensor, source: Tensor) -> None:
    if moved is not source:
        _SOURCES[moved] = source
