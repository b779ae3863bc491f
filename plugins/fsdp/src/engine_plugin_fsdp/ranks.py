"""The ranks of one engine and their meshes for sharding."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine_core.contracts.engines import Layout
from engine_core.errors import ConfigError
from engine_plugin_torch.divisors import divisors, nearest_fit
from engine_plugin_torch.rank_group import RankGroup
from engine_plugin_torch.state import random_state, set_random_state

if TYPE_CHECKING:
    import torch

    from engine_core.contracts.engines import WorkerContext
    from engine_plugin_fsdp.options import FSDPOptions


class Ranks(RankGroup):
    """The ranks of one role with their meshes.

    Args:
        options: the role's table.
        context: rank and number of ranks.
        device: device of this rank, with its index.

    Raises:
        ConfigError: the number of ranks does not fit the table. Nothing was allocated.

    Attributes:
        mesh: ``replicate`` x ``shard``, or ``shard`` alone, over all ranks, for weights that ``tp`` does not split.
        split_mesh: the mesh for units whose layers ``tp`` splits: ``mesh`` without the axis ``tp``.
        tp: mesh of one axis over the ranks that share layers; None without ``tp``.
        layout: place of this rank in the distribution of data.
        sequence: group of the ranks that share the tokens of a micro-batch; None without ``sp``.
        slice: group of the ranks that get the same data; None where each rank has its own data.
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
            axes = _shared_mesh(device, (slices, options.sp, options.tp), ("dp", "sp", "tp"))
            self.sequence = axes.get_group("sp")
        if together > 1:
            axes = _shared_mesh(device, (slices, together), ("dp", "slice"))
            self.slice = axes.get_group("slice")
        self.layout = Layout(self.rank // together, slices, self.rank % together == 0)

    def share_random_state(self) -> None:
        """Copy the leader's random state to the ranks that get the same data. Collective."""
        if self.slice is not None:
            states = self.texts(random_state(self.device))
            set_random_state(states[self.rank - self.slice.rank()], self.device)


def mesh_shape(options: FSDPOptions, size: int, role: str) -> tuple[int, int]:
    """Return the number of copies of the model, and the ranks that each copy is sharded over (without ``tp``).

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
    """Refuse `tp` and `sp` that do not divide the number of ranks."""
    key, fits = f"{role}.fsdp", divisors(size)
    for name in ("tp", "sp"):
        asked = getattr(options, name)
        if size % asked:
            raise ConfigError(
                f"{key}.{name} is {asked}, which does not divide the {size} ranks of this run. "
                f"{nearest_fit(asked, fits)} Or start another number of ranks."
            )
    if size % (options.tp * options.sp):
        fits_with_sp = [n for n in fits if size % (n * options.sp) == 0]
        raise ConfigError(
            f"{key}.tp {options.tp} and {key}.sp {options.sp} make groups of {options.tp * options.sp} ranks, which do not "
            f"divide the {size} ranks of this run. For {key}.tp: {nearest_fit(options.tp, fits_with_sp)} Or start another "
            "number of ranks."
        )


def _mesh(device: torch.device, replicas: int, shards: int, sharding: str, tp: int = 1) -> DeviceMesh:
    """Build the mesh ``replicate`` x ``shard`` x ``tp``, without unused axes."""
    axes = [("shard", shards)]
    if sharding == "none":
        axes = [("replicate", replicas * shards), ("shard", 1)]
    elif replicas > 1:
        axes = [("replicate", replicas), ("shard", shards)]
    if tp > 1:
        axes.append(("tp", tp))
    names, shape = zip(*axes, strict=True)
    return _shared_mesh(device, shape, names)


def _shared_mesh(device: torch.device, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of this shape, which all roles of the process share: each group costs threads or device memory."""
    return _build_mesh(dist.group.WORLD, device.type, shape, names)


@functools.cache
def _build_mesh(
    world: dist.ProcessGroup | None, device_type: str, shape: tuple[int, ...], names: tuple[str, ...]
) -> DeviceMesh:
    """Build a mesh over ``world``, the default group. Collective."""
    return init_device_mesh(device_type, shape, mesh_dim_names=names)
