"""Which nodes the ranks of each pool are on: placement groups, and what is refused before any is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError, EnvironmentProblem, did_you_mean

if TYPE_CHECKING:
    from engine_core.runtime.placement import Pool
    from engine_plugin_ray.plugin import RayOptions

Node = Mapping[str, float]  # resources by name


def nodes_of_cluster() -> dict[str, Node]:
    """What each node that lives has, by address."""
    import ray

    found: dict[str, Node] = {}
    for node in ray.nodes():
        if node["Alive"]:
            address = node["NodeManagerAddress"]
            name = address if address not in found else f"{address}#{len(found)}"  # several on one machine
            found[name] = node["Resources"]
    return found


def resources(options: RayOptions, gpu: bool) -> dict[str, float]:
    """Of one rank."""
    return {"CPU": options.cpus_per_process} | ({"GPU": 1.0} if gpu else {})


def check(
    pools: Sequence[Pool], options: RayOptions, gpu: bool, nodes: Mapping[str, Node], shown: str
) -> None:
    """Refuse what this cluster can never give.

    Args:
        pools: of the run.
        options: ``[runtime.ray]``.
        gpu: each rank has an accelerator.
        nodes: of ``nodes_of_cluster``.
        shown: the cluster, for messages.

    Raises:
        ConfigError: what was asked for, by which roles, and what there is.
    """
    names = [pool.name for pool in pools]
    for key, table in (("strategy", options.strategy), ("python", options.python)):
        if unknown := sorted(set(table) - set(names)):
            raise ConfigError(
                f"runtime.ray.{key}: '{unknown[0]}' is no pool of this run.{did_you_mean(unknown[0], names)}"
            )
    each = resources(options, gpu)
    room = {name: _ranks_on(node, each) for name, node in nodes.items()}
    asked, there = _asked(pools, each), _there(nodes, gpu)
    total = sum(len(pool.ranks) for pool in pools)
    if total > sum(room.values()):
        lower = "placement.pools" if len(pools) > 1 else "runtime.ray.processes"
        raise ConfigError(
            f"{lower}: {asked}; {shown} has room for {sum(room.values())} processes: {there}. Lower it, add nodes"
            f"{', set runtime.ray.device = ' + repr('cpu') if gpu else ', lower runtime.ray.cpus_per_process'}."
        )
    for pool in pools:
        wanted, size = options.strategy.get(pool.name, "pack"), len(pool.ranks)
        largest, useful = max(room.values()), sum(count > 0 for count in room.values())
        if wanted == "strict_pack" and size > largest:
            raise ConfigError(
                f"runtime.ray.strategy.{pool.name} = 'strict_pack': {asked}, and no node of {shown} has room for more "
                f"than {largest}: {there}. Set it to 'pack', or lower placement.pools.{pool.name}."
            )
        if wanted == "strict_spread" and size > useful:
            raise ConfigError(
                f"runtime.ray.strategy.{pool.name} = 'strict_spread': {asked}, and {shown} has {useful} nodes with room "
                f"for one: {there}. Set it to 'spread', or lower placement.pools.{pool.name}."
            )


def reserve(pools: Sequence[Pool], options: RayOptions, gpu: bool) -> list[Any]:
    """A placement group for each pool; all or none.

    Raises:
        EnvironmentProblem: others hold what is needed, for longer than `start_minutes`.
    """
    import ray
    from ray.util.placement_group import placement_group

    groups: list[Any] = []
    try:
        for pool in pools:
            strategy = options.strategy.get(pool.name, "pack").upper()
            bundles = [resources(options, gpu)] * len(pool.ranks)
            groups.append(placement_group(bundles, strategy=strategy))
            if not groups[-1].wait(options.start_minutes * 60):
                free = {
                    name: amount
                    for name, amount in ray.available_resources().items()
                    if name in ("CPU", "GPU")
                }
                raise EnvironmentProblem(
                    f"runtime.ray.start_minutes: no room for {_asked([pool], bundles[0])} within "
                    f"{options.start_minutes:g} minutes; free in the cluster: {free}. Others use the rest: wait, or "
                    "ask for less."
                )
    except BaseException:
        release(groups)
        raise
    return groups


def release(groups: Sequence[Any]) -> None:
    """Give the room back."""
    from ray.util.placement_group import remove_placement_group

    for group in groups:
        remove_placement_group(group)


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
