"""Common functions for sharded tensors (``DTensor``) and plain tensors: the whole tensor, and the part on this rank.

Everything that reads or writes a module's weights uses these functions, so it works on sharded and plain modules.
Tensors have any shape, ``[D0, ...]`` for the whole and ``[P0, ...]`` for the part on a rank.
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
    """Return the whole tensor ``[D0, ...]`` on every rank. Collective if sharded: all its ranks call in one order."""
    return on_mesh(tensor).full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def on_mesh(tensor: DTensor) -> DTensor:
    """Return a tensor ``[D0, ...]`` whose part is on the mesh's kind of device, moved from host memory if needed."""
    local = tensor.to_local().detach()
    kind = tensor.device_mesh.device_type
    return tensor if local.device.type == kind else like(local.to(kind), tensor)


def here(tensor: Tensor) -> Tensor:
    """Return the part ``[P0, ...]`` on this rank as a view: writing to it changes the tensor."""
    # not to_local(), which is a slow autograd function: a step reads hundreds of parts
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


@contextlib.contextmanager
def made_whole(module: nn.Module) -> Iterator[None]:
    """Replace a module's sharded parameters by whole plain tensors within the context. Collective."""
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
    """Return over how many axes of its mesh ``tensor: [D0, ...]`` is split; products of parts need at most one."""
    if not isinstance(tensor, DTensor):
        return 0
    return sum(not placed.is_replicate() for placed in tensor.placements)


def span(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of the whole ``[D0, ...]`` that ``here`` covers."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    chunk: Any
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))


def copies(tensor: Tensor) -> int:
    """Return how many ranks hold each element of ``tensor: [D0, ...]``; 1 for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placed in sizes if placed.is_replicate())


def is_first_copy(tensor: Tensor) -> bool:
    """Return whether this rank is the first of the ranks that hold its part of ``tensor: [D0, ...]``."""
    if not isinstance(tensor, DTensor):
        return True
    place = tensor.device_mesh.get_coordinate() or ()
    return not any(at for at, placed in zip(place, tensor.placements, strict=True) if placed.is_replicate())


def like(local: Tensor, tensor: DTensor) -> DTensor:
    """Return a tensor with the shape ``[D0, ...]`` and placement of ``tensor`` whose part on this rank is ``local``."""
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
    """Write ``old <- (1 - mix) * old + mix * new`` in place; ``new: [D0, ...]`` is whole, or sharded as ``old`` is.

    Not collective: each rank writes its part. Tensors without floating point are replaced.
    """
    part = here(new) if isinstance(new, DTensor) else new[span(old)]
    target = here(old)
    part = part.to(device=target.device, dtype=target.dtype)
    if mix == 1.0 or not target.is_floating_point():
        target.copy_(part)
    else:
        target.lerp_(part, mix)
