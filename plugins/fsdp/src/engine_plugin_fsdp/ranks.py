"""The ranks of one engine: who shards with whom, and small sums over all of them.

The process group is the one that the runtime made. A run of one process gets a group of its own that
opens no socket, so that one rank goes the same way as many.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine_core.engines.base import Layout
from engine_core.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    from engine_core.engines.base import WorkerContext
    from engine_plugin_fsdp.options import FSDPOptions

_OWN_GROUP = {"users": 0}  # engines that use a group of one process that was made here


class Ranks:
    """Meshes over the ranks of one role, and what they agree on.

    Args:
        options: the role's table.
        context: rank and number of ranks.
        device: of this rank, with its index.

    Raises:
        ConfigError: the number of ranks does not fit the table. Nothing was allocated.

    Attributes:
        mesh: ``replicate`` x ``shard``, or ``shard`` alone: what weights are spread over.
        layout: place of this rank among those that get data.
        sequence: group of the ranks that share the tokens of a micro-batch; None where they do not.
    """

    def __init__(self, options: FSDPOptions, context: WorkerContext, device: torch.device) -> None:
        self.device, self.rank, self.size = device, context.rank, context.world_size
        replicas, shards = mesh_shape(options, self.size, context.role)
        self._own = join(self.size, device)
        shape, names = (
            ((replicas, shards), ("replicate", "shard")) if replicas > 1 else ((shards,), ("shard",))
        )
        if options.sharding == "none":
            shape, names = (self.size, 1), ("replicate", "shard")
        self.mesh: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self.sequence: dist.ProcessGroup | None = None
        if options.sp > 1:
            grid = init_device_mesh(
                device.type, (self.size // options.sp, options.sp), mesh_dim_names=("dp", "sp")
            )
            self.sequence = grid.get_group("sp")
        self.layout = Layout(self.rank // options.sp, self.size // options.sp, self.rank % options.sp == 0)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks, float64, on the CPU."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """The largest over all ranks, float64, on the CPU."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def most(self, count: int) -> int:
        """The largest of a number that each rank has."""
        return int(self.largest(torch.tensor(count)))

    def texts(self, mine: object) -> list:
        """What each rank says, by rank: plain values, sent as JSON."""
        said = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        length = self.most(len(said))
        padded = torch.full((length,), 32, dtype=torch.uint8)  # spaces: JSON ends before them
        padded[: len(said)] = said
        padded = padded.to(self.device)
        every = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(every, padded)
        return [json.loads(bytes(one.cpu().tolist())) for one in every]

    def share(self, error: Exception | None, what: str, kind: type[Exception] = OSError) -> None:
        """Every rank learns whether one failed, so that none waits for it.

        Raises:
            Exception: this rank's own error, or one that names the rank that failed.
        """
        told = self.texts(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, problem in enumerate(told):
            if problem is not None:
                raise kind(f"{what} failed on rank {rank}: {problem}")

    def close(self) -> None:
        """Leave the group that was made here; that of a runtime stays."""
        if self._own:
            self._own = False
            _OWN_GROUP["users"] -= 1
            if not _OWN_GROUP["users"]:
                dist.destroy_process_group()

    def _reduced(self, values: Tensor, kind: dist.ReduceOp.RedOpType) -> Tensor:
        sent = values.to(device=self.device, dtype=torch.float64)
        dist.all_reduce(sent, kind)
        return sent.cpu()


def mesh_shape(options: FSDPOptions, size: int, role: str) -> tuple[int, int]:
    """How many copies of the model there are, and over how many ranks each is spread.

    Raises:
        ConfigError: the number of ranks does not fit.
    """
    if size % options.sp:
        raise ConfigError(
            f"{role}.fsdp.sp is {options.sp}, which does not divide the {size} ranks of this run. "
            f"Set it to one of {_divisors(size)}, or start another number of ranks."
        )
    if options.sharding == "none":
        return size, 1
    if options.sharding != "hybrid":
        return 1, size
    group = options.shard_group_size or min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    if size % group:
        raise ConfigError(
            f"{role}.fsdp.shard_group_size is {group}, which does not divide the {size} ranks of this run. "
            f"Set it to one of {_divisors(size)}, or start another number of ranks."
        )
    return size // group, group


def join(size: int, device: torch.device) -> bool:
    """Make sure of a process group; True where it was made here, for one process.

    Raises:
        EnvironmentProblem: there should be several ranks and no runtime has joined them.
    """
    if dist.is_initialized() and not _OWN_GROUP["users"]:
        if dist.get_world_size() != size:
            raise EnvironmentProblem(
                f"This worker was told of {size} ranks, but its process group has {dist.get_world_size()}. "
                "A runtime joins all ranks of a role in one group."
            )
        return False
    if size > 1:
        raise EnvironmentProblem(
            f"There should be {size} ranks, and they have not been joined (torch.distributed is not initialised). "
            'Choose a runtime that starts several ranks: [runtime] backend = "torchrun".'
        )
    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    _OWN_GROUP["users"] += 1
    return True


def _divisors(size: int) -> str:
    return ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
