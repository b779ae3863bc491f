"""Checkpoints and offloading of the FSDP engine, and the gather of whole weights, a bucket at a time.

Optimizer state moves between device and host memory through pinned buffers that are kept: a copy to pageable host
memory waits for the device and runs at a tenth of the link's speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate

from engine_core.runs import state_files
from engine_plugin_torch.sharded import here, on_mesh, whole
from engine_plugin_torch.sharded_checkpoint import ShardedStore

if TYPE_CHECKING:
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
