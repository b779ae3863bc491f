"""The gather of whole weights from sharded ones, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate

from engine_plugin_torch.sharded import on_mesh, whole


def gathered(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each whole tensor ``[D0, ...]`` on every rank; the gathers of one bucket overlap. Collective.

    Args:
        tensors: names and tensors, sharded or plain, in the same order on all ranks.
        limit: most bytes of whole tensors in one bucket; a larger tensor gets a separate bucket.
    """
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and held + size > limit:
            yield from _arrived(bucket)
            bucket, held = [], 0
        bucket.append((name, _start(tensor)))
        held += size
    yield from _arrived(bucket)


def _start(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor) or tensor.device_mesh.device_type == "cpu":
        return whole(tensor)  # gloo has crashed in its threads with several gathers at one time
    every = [Replicate()] * tensor.device_mesh.ndim
    with torch.no_grad():
        return on_mesh(tensor).redistribute(placements=every, async_op=True).to_local()


def _arrived(bucket: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    while bucket:
        name, tensor = bucket.pop(0)
        yield name, tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
