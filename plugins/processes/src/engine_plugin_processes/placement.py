"""Which ranks serve which roles: the pools of ``[placement]``, and the slices of a role's ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.contracts.engines import Layout

DEFAULT_POOL = "all"


@dataclass(frozen=True)
class Pool:
    """Processes that serve the same roles and talk to each other through ``torch.distributed``."""

    name: str
    ranks: range  # of the run
    roles: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {len(self.ranks)} x ({', '.join(self.roles)})"


@dataclass(frozen=True)
class Slice:
    """Ranks of a role that are given the same sequences; the leader answers for them."""

    ranks: tuple[int, ...]  # of the run
    leader: int


def wanted_processes(config: EngineConfig) -> int | None:
    """What the file asks for at the start; None where it leaves it to the machine.

    Raises:
        ConfigError: its two keys disagree.
    """
    processes = config.runtime.options.processes
    pools = config.placement.pools
    asked = None if processes == "auto" else processes
    if not pools:
        return asked
    need = sum(pools.values())
    if asked not in (None, need):
        listed = ", ".join(f"{name} = {size}" for name, size in pools.items())
        raise ConfigError(
            f"placement.pools: {{ {listed} }} need {need} processes, but runtime.{config.runtime.backend}.processes is {asked}. "
            'Make them agree, or set processes = "auto".'
        )
    return need


def plan_pools(config: EngineConfig, roles: Iterable[str], processes: int) -> list[Pool]:
    """The pools of a run, one after another over its ranks.

    Args:
        config: the run file.
        roles: of the run.
        processes: of the start.

    Raises:
        ConfigError: the ranks do not suffice, or a pool has no role.
    """
    roles = tuple(roles)
    sizes = dict(config.placement.pools) or {DEFAULT_POOL: processes}
    if sum(sizes.values()) != processes:
        raise ConfigError(
            f"placement.pools: they need {sum(sizes.values())} processes, and {processes} were started. "
            "Start as many, or change the pools."
        )
    homes = {role: config.placement.pool_of(role) or DEFAULT_POOL for role in roles}
    pools, first = [], 0
    for name, size in sizes.items():
        served = tuple(role for role in roles if homes[role] == name)
        if not served:
            raise ConfigError(
                f"placement.pools: pool '{name}' serves no role of this run ({', '.join(roles)}). Take it out, or "
                f"name it in [placement]."
            )
        pools.append(Pool(name, range(first, first + size), served))
        first += size
    return pools


def check_replaceable(config: EngineConfig, pools: Sequence[Pool], can_start: bool) -> None:
    """Refuse samplers that are to be replaced one by one, and cannot.

    Args:
        config: the run file.
        pools: of the run.
        can_start: the runtime starts its processes itself.

    Raises:
        ConfigError: why not.
    """
    key = f"runtime.{config.runtime.backend}.max_replacements"
    roles = next((pool.roles for pool in pools if "rollout" in pool.roles), ())
    if tuple(roles) != ("rollout",):
        raise ConfigError(
            f"{key}: only a sampler in a pool of its own can be replaced; here its processes serve "
            f"{', '.join(roles) or 'no sampler'}. Give it a pool ([placement]), or set {key} = 0."
        )
    if not can_start:
        raise ConfigError(
            f"{key}: processes that another has started cannot be replaced by the run. Set it to 0, and see max_restarts."
        )


def slices_of(role: str, layouts: Sequence[Layout], ranks: Sequence[int]) -> list[Slice]:
    """The data-parallel slices of a role, in their order.

    Raises:
        PluginError: the engine's layouts do not make a whole.
    """
    size = layouts[0].dp_size
    slices = []
    for dp_rank in range(size):
        members = [r for r, layout in zip(ranks, layouts, strict=True) if layout.dp_rank == dp_rank]
        leaders = [r for r, at in zip(ranks, layouts, strict=True) if at.dp_rank == dp_rank and at.is_leader]
        if len(leaders) != 1 or any(layout.dp_size != size for layout in layouts):
            shown = ", ".join(f"{at.dp_rank} of {at.dp_size}{' (leader)' * at.is_leader}" for at in layouts)
            raise PluginError(
                f"The engine of role '{role}' gives layouts that do not fit together: {shown}. Each data-parallel "
                "slice has ranks, one of which is its leader. This is a bug of the plugin."
            )
        slices.append(Slice(tuple(members), leaders[0]))
    return slices
