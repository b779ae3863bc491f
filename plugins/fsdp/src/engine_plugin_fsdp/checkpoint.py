"""Checkpoints and offloading of the FSDP engine, and the gather of whole weights, a bucket at a time.

Optimizer state moves between device and host memory through pinned buffers that are kept: a copy to pageable host
memory waits for the device and runs at a tenth of the link's speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from engine_core.contracts.weight_sync import buckets
from engine_core.runs import state_files
from engine_plugin_torch.sharded import axes_that_split, here, whole
from engine_plugin_torch.sharded_checkpoint import ShardedStore

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from engine_plugin_fsdp.engine import FSDPEngine


class FSDPStore(ShardedStore):
    """A ``ShardedStore`` that keeps the optimizer's state in host memory if `cpu_offload` says so."""

    engine: FSDPEngine

    def __init__(self, engine: FSDPEngine) -> None:
        super().__init__(engine)
        self._host_memory = HostMemory()

    def load(self, folder: Path) -> None:
        """Load this rank's part; a rank that the saving run did not have keeps its random state.

        If the number of ranks or of slices has changed, ranks with the same data continue with their leader's state.
        """
        super().load(folder)
        scalars = state_files.load_json(folder / state_files.STATE)
        if any(scalars.get(name) != value for name, value in self.engine.ranks.described.items()):
            self.engine.ranks.share_random_state()
        self.move_optimizer(self._optimizer_device)

    # -- device memory ------------------------------------------------------

    def _move(self, parts: set[str], device: torch.device) -> None:
        stays = self.engine.options.cpu_offload == "params" or self.engine.device.type == "cpu"
        if "weights" in parts and self.engine.root is not None and not stays:
            self.engine.root.to(device)  # FSDP follows its parameters
        if "optimizer" in parts:
            self.move_optimizer(device if device.type == "cpu" else self._optimizer_device)

    @property
    def _optimizer_device(self) -> torch.device:
        """Device of the optimizer's state between steps."""
        return self.engine.device if self.engine.options.cpu_offload == "none" else torch.device("cpu")

    @property
    def step_device(self) -> torch.device:
        """Device of the optimizer's state during a step."""
        return torch.device("cpu") if self.engine.options.cpu_offload == "params" else self.engine.device

    def move_optimizer(self, device: torch.device) -> None:
        """Move the optimizer's state to ``device``."""
        if self.engine.optimizer is not None:
            self._host_memory.move(self.engine.optimizer, device)


class HostMemory:
    """Pinned buffers in host memory, one for each tensor of state that has been moved there."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, str], Tensor] = {}

    def move(self, optimizer: Optimizer, device: torch.device) -> None:
        """Move every tensor of state to ``device``; scalars (step counts) stay.

        A move to the host is complete when this returns. A move to an accelerator is ordered by its current stream.
        """
        waits = False
        for index, values in enumerate(optimizer.state.values()):
            for key, value in values.items():
                if isinstance(value, Tensor) and value.ndim and here(value).device.type != device.type:
                    values[key] = self._moved((index, key), value, device)
                    waits = device.type == "cpu"
        if waits:
            torch.accelerator.synchronize()

    def _moved(self, place: tuple[int, str], value: Tensor, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return value.to(device, non_blocking=True)
        held = self._buffers.get(place)
        if held is None or here(held).shape != here(value).shape or held.dtype != value.dtype:
            held = torch.empty_like(value, device="cpu", pin_memory=True)
            self._buffers[place] = held
        here(held).copy_(here(value), non_blocking=True)
        return held


def gathered(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each whole tensor ``[D0, ...]`` on every rank; the parts of one bucket are sent as one message. Collective.

    A gather for each weight would take longer to start than to run: 0.2 s for the 398 weights of a 4B model.

    Args:
        tensors: names and tensors, sharded or plain, in the same order on all ranks.
        limit: most bytes of whole tensors in one bucket; a larger tensor gets a separate bucket.
    """
    for bucket in buckets(tensors, limit, lambda tensor: tensor.numel() * tensor.element_size()):
        alike: dict[Any, list[DTensor]] = {}
        for _, tensor in bucket:
            if (kind := _kind(tensor)) is not None:
                alike.setdefault(kind, []).append(cast("DTensor", tensor))
        found = {kind: iter(_gather(some, kind[1])) for kind, some in alike.items()}
        for name, tensor in bucket:
            yield name, whole(tensor) if (kind := _kind(tensor)) is None else next(found[kind])


def _kind(tensor: Tensor) -> tuple[DeviceMesh, int, torch.dtype] | None:
    """Return mesh, axis and type of a tensor ``[D0, ...]`` whose rows are split over that axis alone; None for others."""
    if not isinstance(tensor, DTensor) or axes_that_split(tensor) != 1:
        return None
    axis, placed = next(each for each in enumerate(tensor.placements) if not each[1].is_replicate())
    rows = type(placed) is Shard and placed.dim == 0
    return (tensor.device_mesh, axis, tensor.dtype) if rows else None


@torch.no_grad()
def _gather(tensors: list[DTensor], axis: int) -> list[Tensor]:
    """Return whole tensors ``[D0, ...]`` of one type whose rows are split over the same axis of one mesh. Collective."""
    mesh = tensors[0].device_mesh
    size = mesh.size(axis)
    rows = [-(-tensor.shape[0] // size) for tensor in tensors]  # of a part; the last part may have fewer
    counts = [most * math.prod(tensor.shape[1:]) for most, tensor in zip(rows, tensors, strict=True)]
    mine = torch.empty(sum(counts), dtype=tensors[0].dtype, device=mesh.device_type)
    parts = [here(tensor).reshape(-1) for tensor in tensors]
    torch._foreach_copy_(
        [place[: len(part)] for place, part in zip(mine.split(counts), parts, strict=True)], parts
    )
    every = mine.new_empty(size * len(mine))
    dist.all_gather_into_tensor(every, mine, group=mesh.get_group(axis))
    return [
        part.reshape(size * most, *tensor.shape[1:])[: tensor.shape[0]]
        for part, most, tensor in zip(every.view(size, -1).split(counts, dim=1), rows, tensors, strict=True)
    ]
