"""The placement of roles on ranks: the pools of ``[placement]``, and the slices of a role's ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.config.choices import bare
from engine_core.errors import ConfigError, PluginError, did_you_mean

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.contracts.engines import Layout

DEFAULT_POOL = "all"


@dataclass(frozen=True)
class Pool:
    """A group of processes that serve the same roles and form one ``torch.distributed`` world."""

    name: str  #: as in ``placement.pools``
    ranks: range  #: of the run
    roles: tuple[str, ...]  #: roles that it serves

    def __str__(self) -> str:
        return f"{self.name}: {len(self.ranks)} x ({', '.join(self.roles)})"


@dataclass(frozen=True)
class Slice:
    """A group of a role's ranks that receive the same sequences; the leader's results count."""

    ranks: tuple[int, ...]  #: of the run
    leader: int  #: the rank whose results count


def problems(config: EngineConfig) -> Iterator[str]:
    """Yield why the pools of ``[placement]`` do not fit the roles, each other, or the number of processes."""
    placement, runtime, found = config.placement, config.runtime, list[str]()
    pools, roles = placement.pools, ("actor", "critic", "ref", "teacher", "rollout", "reward")
    for role in roles:
        pool = getattr(placement, role)
        if pool is not None and pool not in pools:
            found.append(
                f"placement.{role}: got '{pool}', expected a pool of placement.pools.{did_you_mean(pool, pools)}"
            )
        elif pool is None and len(pools) > 1 and role in ("actor", "rollout"):
            found.append(
                f"placement.{role}: missing. With several pools ({', '.join(pools)}) each role must name its pool."
            )
    yield from found
    if not found and (idle := pools.keys() - {placement.pool_of(role) for role in roles}):
        names = ", ".join(sorted(idle))
        yield f"placement.pools: no role is in pool {names}, which would idle. Remove it or use it."
    asked, need = runtime.options.processes, sum(pools.values())
    if pools and asked not in ("auto", need):
        listed = ", ".join(f"{name} = {size}" for name, size in pools.items())
        yield (
            f"placement.pools: {{ {listed} }} need {need} processes, but runtime.{bare(runtime.backend)}.processes is {asked}. "
            'Make them agree, or set processes = "auto".'
        )


def wanted_processes(config: EngineConfig) -> int | None:
    """Return the number of processes that the run file asks for; None if it depends on the machine."""
    processes = config.runtime.options.processes
    return sum(config.placement.pools.values()) or (None if processes == "auto" else processes)


def plan_pools(config: EngineConfig, roles: Iterable[str], processes: int) -> list[Pool]:
    """Return the pools of a run, which have consecutive ranks.

    Args:
        config: the run file.
        roles: roles of the run.
        processes: number of started processes.

    Raises:
        ConfigError: the pools need another number of processes, or a pool serves no role.
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
    """Check that lost samplers of this run can be replaced one by one.

    Args:
        config: the run file.
        pools: pools of the run.
        can_start: whether the runtime starts its processes itself.

    Raises:
        ConfigError: the sampler shares its pool with other roles, or the runtime cannot start processes.
    """
    key = f"runtime.{config.runtime.backend}.max_replacements"
    roles = next((pool.roles for pool in pools if "rollout" in pool.roles), ())
    if tuple(roles) != ("rollout",):
        raise ConfigError(
            f"{key}: only a sampler in a separate pool can be replaced; here its processes serve "
            f"{', '.join(roles) or 'no sampler'}. Give it a pool ([placement]), or set {key} = 0."
        )
    if not can_start:
        raise ConfigError(
            f"{key}: processes that another has started cannot be replaced by the run. Set it to 0, and see max_restarts."
        )


def slices_of(role: str, layouts: Sequence[Layout], ranks: Sequence[int]) -> list[Slice]:
    """Return the data-parallel slices of a role, in order.

    Args:
        role: name of the role, for messages.
        layouts: layout of each rank.
        ranks: ranks in the run, in the order of ``layouts``.

    Raises:
        PluginError: the layouts do not form complete slices with one leader each.
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
