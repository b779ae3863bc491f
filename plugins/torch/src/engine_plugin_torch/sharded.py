"""Tensors that are spread over ranks (``DTensor``), and plain ones as if they were: the whole, and what lies here.

Everything that reads or writes a module's weights goes through these functions, so that it works on a
sharded module as it does on a plain one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, on every rank. Of a sharded one collective: all its ranks must ask, in one order."""
    return on_mesh(tensor).full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def on_mesh(tensor: DTensor) -> DTensor:
    """A sharded tensor whose part lies on its mesh's kind of device, where its ranks can talk; it may lie in host memory."""
    local = tensor.to_local().detach()
    kind = tensor.device_mesh.device_type
    return tensor if local.device.type == kind else like(local.to(kind), tensor)


def here(tensor: Tensor) -> Tensor:
    """The part that lies on this rank: a view, so that writing to it changes the tensor."""
    # not to_local(), which is a function of autograd: a step asks for hundreds of parts
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


@contextlib.contextmanager
def made_whole(module: nn.Module) -> Iterator[None]:
    """Within it the sharded parameters of a module are whole plain tensors, to compute from. Collective."""
    held = [
        (part, name, p) for part in module.modules() for name, p in part._parameters.items() if p is not None
    ]
    try:
        for part, name, parameter in held:
            part._parameters[name] = nn.Parameter(whole(parameter), requires_grad=False)
        yield
    finally:
        for part, name, parameter in held:
            part._parameters[name] = parameter


def axes_that_split(tensor: Tensor) -> int:
    """Over how many axes of its mesh a sharded tensor is split: with one, products are taken part by part."""
    if not isinstance(tensor, DTensor):
        return 0
    return sum(not placed.is_replicate() for placed in tensor.placements)


def span(tensor: Tensor) -> tuple[slice, ...]:
    """Which part of the whole ``here`` is."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    chunk: Any
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))


def copies(tensor: Tensor) -> int:
    """How many of a sharded tensor's ranks hold each of its elements."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placed in sizes if placed.is_replicate())


def is_first_copy(tensor: Tensor) -> bool:
    """Whether this rank is the first of those that hold its part."""
    if not isinstance(tensor, DTensor):
        return True
    place = tensor.device_mesh.get_coordinate() or ()
    return not any(at for at, placed in zip(place, tensor.placements, strict=True) if placed.is_replicate())


def like(local: Tensor, tensor: DTensor) -> DTensor:
    """A tensor of ``tensor``'s shape and placement whose part here is ``local``."""
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@torch.no_grad()
def write(old: Tensor, new: Tensor, mix: float = 1.0) -> None:
    """``old <- (1 - mix) * old + mix * new`` in place; ``new`` is whole, or sharded as ``old`` is.

    No collective: each rank writes its part. What is not of floating point is replaced.
    """
    part = here(new) if isinstance(new, DTensor) else new[span(old)]
    target = here(old)
    part = part.to(device=target.device, dtype=target.dtype)
    if mix == 1.0 or not target.is_floating_point():
        target.copy_(part)
    else:
        target.lerp_(part, mix)
