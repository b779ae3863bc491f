"""Placement of each pool's ranks on nodes: placement groups, and checks before any is requested."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError, EnvironmentProblem, did_you_mean
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
    """Yield what is wrong with ``[runtime.ray]`` on any cluster: unknown pools, and requests beyond any machine.

    Args:
        config: the run's config. Processes whose number the machine decides (``"auto"``) are not counted.
    """
    options: RayOptions = config.runtime.options
    sizes = dict(config.placement.pools)
    if unknown := list(unknown_pools(list(sizes) or [DEFAULT_POOL], options)):
        yield from unknown
        return
    if not sizes and options.processes != "auto":
        sizes = {DEFAULT_POOL: options.processes}
    for name, size in sizes.items() if not (options.address or _connected()) else ():
        if options.strategy.get(name) == "strict_spread" and size > 1:
            yield (
                f"runtime.ray.strategy.{name} = 'strict_spread': {size} processes on as many nodes, and a cluster of the run's "
                f"own is this machine alone. Set it to 'spread', name a cluster in runtime.ray.address, or lower {_key_of(name)}."
            )


def _connected() -> bool:
    """Return whether the program that contains this run is connected to a cluster, which the run then uses."""
    ray = sys.modules.get("ray")  # its import takes a second; without it there is no connection
    return ray is not None and ray.is_initialized()


def unknown_pools(names: Sequence[str], options: RayOptions) -> Iterator[str]:
    """Yield the pools of ``[runtime.ray]`` that the run does not have.

    Args:
        names: names of the run's pools.
        options: ``[runtime.ray]``.
    """
    for key, table in (("strategy", options.strategy), ("python", options.python)):
        for unknown in sorted(set(table) - set(names)):
            yield f"runtime.ray.{key}: '{unknown}' is no pool of this run.{did_you_mean(unknown, names)}"


def check(
    pools: Sequence[Pool], options: RayOptions, gpu: bool, nodes: Mapping[str, Node], shown: str
) -> None:
    """Raise for pools that this cluster can never hold.

    Args:
        pools: the run's pools.
        options: ``[runtime.ray]``.
        gpu: each rank has an accelerator.
        nodes: the result of ``nodes_of_cluster``.
        shown: the cluster, for messages.

    Raises:
        ConfigError: with the requested processes, their roles, and the cluster's resources.
    """
    if unknown := list(unknown_pools([pool.name for pool in pools], options)):
        raise ConfigError(unknown)
    each = resources(options, gpu)
    room = {name: _ranks_on(node, each) for name, node in nodes.items()}
    asked, there = _asked(pools, each), _there(nodes, gpu)
    total = sum(len(pool.ranks) for pool in pools)
    if total > sum(room.values()):
        key = _size_key(pools[0]) if len(pools) == 1 else "placement.pools"
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
                f"than {largest}: {there}. Set it to 'pack', or lower {_size_key(pool)}."
            )
        if wanted == "strict_spread" and size > useful:
            raise ConfigError(
                f"runtime.ray.strategy.{pool.name} = 'strict_spread': {asked}, and {shown} has {useful} node"
                f"{'s' * (useful != 1)} with room for one: {there}. Set it to 'spread', or lower {_size_key(pool)}."
            )
    if not _fit_together(pools, options, room.values()):
        strict = ", ".join(f"{name} = '{kind}'" for name, kind in _strict(pools, options).items())
        raise ConfigError(
            f"runtime.ray.strategy: {asked}, and {shown} has no room for all of them at a time with {strict}: {there}. "
            "Set one to 'pack' or 'spread', or lower placement.pools."
        )


def _fit_together(pools: Sequence[Pool], options: RayOptions, room: Iterable[int]) -> bool:
    """Return whether all pools fit at once, given that each fits alone and all processes have one size.

    Args:
        room: number of processes that each node has room for.
    """
    kinds = _strict(pools, options)
    sizes = {pool.name: len(pool.ranks) for pool in pools}
    packed = sorted((sizes[name] for name, kind in kinds.items() if kind == "strict_pack"), reverse=True)
    spread = [sizes[name] for name, kind in kinds.items() if kind == "strict_spread"]
    seen: set[tuple[int, tuple[int, ...]]] = set()

    def fit(done: int, left: tuple[int, ...]) -> bool:
        """Return whether the pools from number ``done`` on fit into the rooms that are left."""
        if done == len(packed):
            return _spread_out(spread, left)
        if (done, left) in seen:
            return False
        seen.add((done, left))
        return any(
            fit(done + 1, _less(left, count, packed[done])) for count in set(left) if count >= packed[done]
        )

    return fit(0, tuple(sorted(room, reverse=True)))


def _less(left: tuple[int, ...], count: int, size: int) -> tuple[int, ...]:
    """Return the rooms after ``size`` processes went to a node that had ``count``, the largest first."""
    rest = list(left)
    rest.remove(count)
    return tuple(sorted([*rest, count - size], reverse=True))


def _spread_out(sizes: Sequence[int], left: tuple[int, ...]) -> bool:
    """Return whether pools with a node for each process fit, if each takes the nodes with most room."""
    for size in sorted(sizes, reverse=True):
        if size and left[size - 1] == 0:
            return False
        left = tuple(sorted((*(count - 1 for count in left[:size]), *left[size:]), reverse=True))
    return True


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


def _strict(pools: Sequence[Pool], options: RayOptions) -> dict[str, str]:
    """Return the strict strategies by pool."""
    kinds = {pool.name: options.strategy.get(pool.name, "pack") for pool in pools}
    return {name: kind for name, kind in kinds.items() if kind.startswith("strict_")}


def _order(pool: Pool, options: RayOptions) -> tuple[int, int]:
    """Return a sort key that puts pools first that are hardest to place."""
    kinds = ("strict_pack", "strict_spread", "pack", "spread")
    return kinds.index(options.strategy.get(pool.name, "pack")), -len(pool.ranks)


def _size_key(pool: Pool) -> str:
    return _key_of(pool.name)


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
