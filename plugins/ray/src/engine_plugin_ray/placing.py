"""Placement of each pool's ranks on nodes: placement groups, and checks before any is requested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError, EnvironmentProblem, did_you_mean
from engine_plugin_processes import placement
from engine_plugin_processes.placement import DEFAULT_POOL

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_plugin_processes.placement import Pool
    from engine_plugin_ray.plugin import RayOptions

Node = Mapping[str, float]  # resources by name
THIS_MACHINE = "this machine"  # name of the only node, before a private cluster is started


def nodes_of_cluster() -> dict[str, Node]:
    """Return the resources of each live node, by address."""
    import ray

    found: dict[str, Node] = {}
    for node in ray.nodes():
        if node["Alive"]:
            address = node["NodeManagerAddress"]
            name = address if address not in found else f"{address}#{len(found)}"  # several on one machine
            found[name] = node["Resources"]
    return found


def resources(options: RayOptions, gpu: bool) -> dict[str, float]:
    """Return the resources of one rank."""
    return {"CPU": options.cpus_per_process} | ({"GPU": 1.0} if gpu else {})


def problems(config: EngineConfig) -> Iterator[str]:
    """Yield the problems of ``[placement]`` and the pools of ``runtime.ray.strategy`` that the run does not have.

    Args:
        config: the run's config.
    """
    yield from placement.problems(config)
    names = list(config.placement.pools) or [DEFAULT_POOL]
    for unknown in sorted(set(config.runtime.options.strategy) - set(names)):
        yield f"runtime.ray.strategy: '{unknown}' is no pool of this run.{did_you_mean(unknown, names)}"


def check(
    pools: Sequence[Pool], options: RayOptions, gpu: bool, nodes: Mapping[str, Node], shown: str
) -> None:
    """Raise for pools of which this cluster can never hold one, or all without their strategies.

    Args:
        pools: the run's pools.
        options: ``[runtime.ray]``.
        gpu: each rank has an accelerator.
        nodes: the result of ``nodes_of_cluster``.
        shown: the cluster, for messages.

    Raises:
        ConfigError: with the requested processes, their roles, and the cluster's resources.
    """
    each = resources(options, gpu)
    room = {name: _ranks_on(node, each) for name, node in nodes.items()}
    asked, there = _asked(pools, each), _there(nodes, gpu)
    total = sum(len(pool.ranks) for pool in pools)
    if total > sum(room.values()):
        key = _key_of(pools[0].name) if len(pools) == 1 else "placement.pools"
        raise ConfigError(
            f"{key}: {asked}; {shown} has room for "
            f"{sum(room.values())} processes: {there}. Lower it, {_other_ways(total, each, nodes)}."
        )
    for pool in pools:
        wanted, size = options.strategy.get(pool.name, "pack"), len(pool.ranks)
        largest, useful = max(room.values()), sum(count > 0 for count in room.values())
        if wanted == "strict_pack" and size > largest:
            raise ConfigError(
                f"runtime.ray.strategy.{pool.name} = 'strict_pack': {asked}, and no node of {shown} has room for more "
                f"than {largest}: {there}. Set it to 'pack', or lower {_key_of(pool.name)}."
            )
        if wanted == "strict_spread" and size > useful:
            raise ConfigError(
                f"runtime.ray.strategy.{pool.name} = 'strict_spread': {asked}, and {shown} has {useful} node"
                f"{'s' * (useful != 1)} with room for one: {there}. Set it to 'spread', or lower {_key_of(pool.name)}."
            )


def reserve(pools: Sequence[Pool], options: RayOptions, gpu: bool) -> list[Any]:
    """Reserve a placement group for each pool; all or none.

    Raises:
        EnvironmentProblem: other jobs hold the resources for longer than `startup_timeout_minutes`.
    """
    import ray
    from ray.util.placement_group import placement_group

    groups: dict[int, Any] = {}  # by the first rank of their pool
    try:
        for pool in sorted(pools, key=lambda pool: _order(pool, options)):
            strategy, first = options.strategy.get(pool.name, "pack").upper(), pool.ranks[0]
            bundles = [resources(options, gpu)] * len(pool.ranks)
            groups[first] = placement_group(bundles, strategy=strategy)
            if not groups[first].wait(options.startup_timeout_minutes * 60):
                free = {
                    name: amount
                    for name, amount in ray.available_resources().items()
                    if name in ("CPU", "GPU")
                }
                raise EnvironmentProblem(
                    f"runtime.ray.startup_timeout_minutes: no room for {_asked([pool], bundles[0])} within "
                    f"{options.startup_timeout_minutes:g} minutes; free in the cluster: {free}. Others use the rest: wait, or "
                    "ask for less."
                )
    except BaseException:
        release(list(groups.values()))
        raise
    return [groups[pool.ranks[0]] for pool in pools]


def release(groups: Sequence[Any]) -> None:
    """Release placement groups."""
    from ray.util.placement_group import remove_placement_group

    for group in groups:
        remove_placement_group(group)


def _order(pool: Pool, options: RayOptions) -> tuple[int, int]:
    """Return a sort key that puts pools first that are hardest to place."""
    kinds = ("strict_pack", "strict_spread", "pack", "spread")
    return kinds.index(options.strategy.get(pool.name, "pack")), -len(pool.ranks)


def _key_of(name: str) -> str:
    """Return the key that sets a pool's number of processes."""
    return "runtime.ray.processes" if name == DEFAULT_POOL else f"placement.pools.{name}"


def _other_ways(total: int, each: Mapping[str, float], nodes: Mapping[str, Node]) -> str:
    """Return alternatives to fewer processes, by the resource that is short."""
    short = [
        kind
        for kind, amount in each.items()
        if sum(_ranks_on(node, {kind: amount}) for node in nodes.values()) < total
    ]
    ways = {"CPU": "lower runtime.ray.cpus_per_process", "GPU": "set runtime.ray.device = 'cpu'"}
    grow = "look at CUDA_VISIBLE_DEVICES" if THIS_MACHINE in nodes else "add nodes"
    return ", ".join([grow, *(ways[kind] for kind in short)])


def _ranks_on(node: Node, each: Mapping[str, float]) -> int:
    return int(min(node.get(name, 0.0) / amount + 1e-9 for name, amount in each.items()))


def _asked(pools: Sequence[Pool], each: Mapping[str, float]) -> str:
    listed = ", ".join(f"{pool.name} = {len(pool.ranks)} ({', '.join(pool.roles)})" for pool in pools)
    one = " and ".join(f"{amount:g} {name}" for name, amount in each.items())
    return f"{listed} asks for {one} a process"


def _there(nodes: Mapping[str, Node], gpu: bool) -> str:
    kinds = ("CPU", "GPU") if gpu else ("CPU",)
    return "; ".join(
        f"{name} has " + " and ".join(f"{node.get(kind, 0):g} {kind}" for kind in kinds)
        for name, node in nodes.items()
    )
