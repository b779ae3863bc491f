"""The ranks of one engine: who shards with whom."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine_core.contracts.engines import Layout
from engine_core.errors import ConfigError
from engine_plugin_torch.divisors import divisors, nearest_fit
from engine_plugin_torch.rank_group import RankGroup
from engine_plugin_torch.state import random_state, set_random_state

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from engine_core.contracts.engines import WorkerContext
    from engine_plugin_fsdp.options import FSDPOptions


class Ranks(RankGroup):
    """Meshes over the ranks of one role, and what they agree on.

    Args:
        options: the role's table.
        context: rank and number of ranks.
        device: of this rank, with its index.

    Raises:
        ConfigError: the number of ranks does not fit the table. Nothing was allocated.

    Attributes:
        mesh: ``replicate`` x ``shard``, or ``shard`` alone: what weights are spread over that no rank of ``tp`` has a part
            of its own of. It has all ranks.
        split_mesh: the same for units whose layers are split over ``tp``: of each ``tp`` rank the others of its kind.
        tp: the ranks that share layers, a mesh of one axis; None where they do not.
        layout: place of this rank among those that get data.
        sequence: group of the ranks that share the tokens of a micro-batch; None where they do not.
        slice: group of the ranks that are given the same data; None where each has its own.
    """

    def __init__(self, options: FSDPOptions, context: WorkerContext, device: torch.device) -> None:
        replicas, shards = mesh_shape(options, context.world_size, context.role)
        super().__init__(context.rank, context.world_size, device)
        self.mesh = _mesh(device, replicas, shards * options.tp, options.sharding)
        self.split_mesh, self.tp = self.mesh, None
        if options.tp > 1:
            grid = _mesh(device, replicas, shards, options.sharding, options.tp)
            self.tp = grid["tp"]
            self.split_mesh = grid[tuple(name for name in grid.mesh_dim_names or () if name != "tp")]
        together = options.sp * options.tp  # ranks of one data-parallel slice
        slices = self.size // together
        self.sequence: dist.ProcessGroup | None = None
        self.slice: dist.ProcessGroup | None = None
        if options.sp > 1:
            axes = init_device_mesh(
                device.type, (slices, options.sp, options.tp), mesh_dim_names=("dp", "sp", "tp")
            )
            self.sequence = axes.get_group("sp")
        if together > 1:
            axes = init_device_mesh(device.type, (slices, together), mesh_dim_names=("dp", "slice"))
            self.slice = axes.get_group("slice")
        self.layout = Layout(self.rank // together, slices, self.rank % together == 0)

    def share_random_state(self) -> None:
        """Ranks that are given the same data draw the same random numbers from here on: the leader's."""
        if self.slice is not None:
            told = self.texts(random_state(self.device))
            set_random_state(told[self.rank - self.slice.rank()], self.device)


def mesh_shape(options: FSDPOptions, size: int, role: str) -> tuple[int, int]:
    """How many copies of the model there are, and over how many ranks each is spread besides those of ``tp``.

    Raises:
        ConfigError: the number of ranks does not fit.
    """
    _check_groups(options, size, role)
    shards = size // options.tp
    if options.sharding == "none":
        return shards, 1
    if options.sharding != "hybrid":
        return 1, shards
    host = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", size)) // options.tp)
    group = options.shard_group_size or min(shards, host)
    if shards % group:
        per = f" ({size} ranks, {options.tp} of which share each layer)" if options.tp > 1 else " of this run"
        raise ConfigError(
            f"{role}.fsdp.shard_group_size is {group}, which does not divide the {shards} ranks{per}. "
            f"{nearest_fit(group, divisors(shards))} Or start another number of ranks."
        )
    return shards // group, group


def _check_groups(options: FSDPOptions, size: int, role: str) -> None:
    """Refuse groups of ranks for tokens and layers that leave some over."""
    key, fits = f"{role}.fsdp", divisors(size)
    for name in ("tp", "sp"):
        asked = getattr(options, name)
        if size % asked:
            raise ConfigError(
                f"{key}.{name} is {asked}, which does not divide the {size} ranks of this run. "
                f"{nearest_fit(asked, fits)} Or start another number of ranks."
            )
    if size % (options.tp * options.sp):
        beside = [n for n in fits if size % (n * options.sp) == 0]
        raise ConfigError(
            f"{key}.tp {options.tp} and {key}.sp {options.sp} make groups of {options.tp * options.sp} ranks, which do not "
            f"divide the {size} ranks of this run. For {key}.tp: {nearest_fit(options.tp, beside)} Or start another "
            "number of ranks."
        )


def _mesh(device: torch.device, replicas: int, shards: int, sharding: str, tp: int = 1) -> DeviceMesh:
    """``replicate`` x ``shard`` x ``tp``, without the axes that are not used."""
    axes = [("shard", shards)]
    if sharding == "none":
        axes = [("replicate", replicas * shards), ("shard", 1)]
    elif replicas > 1:
        axes = [("replicate", replicas), ("shard", shards)]
    if tp > 1:
        axes.append(("tp", tp))
    names, shape = zip(*axes, strict=True)
    return init_device_mesh(device.type, shape, mesh_dim_names=names)
