"""Placements that a cluster can never provide are refused, with the requests of each role and the
cluster's resources.
"""

from collections import Counter
from itertools import combinations_with_replacement
from random import Random

import pytest

from engine_core.errors import ConfigError
from engine_plugin_processes.placement import Pool
from engine_plugin_ray.placing import THIS_MACHINE, _order, check, release, reserve
from engine_plugin_ray.plugin import RayOptions

TRAIN = Pool("train", range(4), ("actor", "ref"))
SERVE = Pool("serve", range(4, 6), ("rollout",))
NODES = {"10.0.0.1": {"CPU": 8.0, "GPU": 2.0}, "10.0.0.2": {"CPU": 8.0, "GPU": 3.0}}


def refusal(pools, nodes=NODES, gpu=True, **options):
    with pytest.raises(ConfigError) as caught:
        check(pools, RayOptions(**options), gpu, nodes, "the cluster at 'x:1'")
    return str(caught.value)


def test_more_accelerators_than_there_are_are_refused_with_roles_and_nodes():
    assert refusal([TRAIN, SERVE]) == (
        "placement.pools: train = 4 (actor, ref), serve = 2 (rollout) asks for 1 CPU and 1 GPU a process; the cluster "
        "at 'x:1' has room for 5 processes: 10.0.0.1 has 8 CPU and 2 GPU; 10.0.0.2 has 8 CPU and 3 GPU. Lower it, add "
        "nodes, set runtime.ray.device = 'cpu'."
    )


def test_what_fits_exactly_is_taken():
    check([Pool("train", range(5), ("actor",))], RayOptions(), True, NODES, "it")
    check([TRAIN, SERVE], RayOptions(cpus_per_process=2), False, NODES, "it")


def test_cpus_are_counted_by_node():
    """Two nodes of 8 have room for two processes of 5, not for three."""
    text = refusal([Pool("all", range(3), ("actor",))], gpu=False, cpus_per_process=5)
    assert text.startswith("runtime.ray.processes: all = 3 (actor) asks for 5 CPU a process; ")
    assert "has room for 2 processes" in text
    assert "lower runtime.ray.cpus_per_process" in text


def test_a_strict_strategy_that_no_cluster_of_this_shape_can_keep_is_refused():
    text = refusal([TRAIN], strategy={"train": "strict_pack"})
    assert "runtime.ray.strategy.train = 'strict_pack': train = 4 (actor, ref)" in text
    assert "no node of the cluster at 'x:1' has room for more than 3" in text
    text = refusal([TRAIN], strategy={"train": "strict_spread"})
    assert "has 2 nodes with room for one" in text
    check([SERVE], RayOptions(strategy={"serve": "strict_spread"}), True, NODES, "it")
    check([TRAIN], RayOptions(strategy={"train": "spread"}), True, NODES, "it")


@pytest.mark.parametrize("key", ["strategy", "python"])
def test_a_pool_that_is_none_is_named_with_the_nearest(key):
    text = refusal([TRAIN, SERVE], **{key: {"trian": "pack"}})
    assert text.startswith(f"runtime.ray.{key}: 'trian' is no pool of this run. Did you mean 'train'?")


def test_what_is_short_says_what_to_lower():
    cpu, gpu = "lower runtime.ray.cpus_per_process", "set runtime.ray.device = 'cpu'"
    text = refusal([TRAIN], cpus_per_process=9)
    assert text.startswith(
        "placement.pools.train: train = 4 (actor, ref) asks for 9 CPU and 1 GPU a process; "
    )
    assert text.endswith(f" Lower it, add nodes, {cpu}.")
    assert refusal([TRAIN, SERVE], cpus_per_process=9).endswith(f" Lower it, add nodes, {cpu}, {gpu}.")
    assert refusal([TRAIN, SERVE]).endswith(f" Lower it, add nodes, {gpu}.")


def test_a_machine_of_too_few_accelerators_is_refused_with_roles_as_a_cluster_is():
    text = refusal([TRAIN, SERVE], {THIS_MACHINE: {"CPU": 6.0, "GPU": 2.0}})
    assert "train = 4 (actor, ref), serve = 2 (rollout) asks for 1 CPU and 1 GPU a process; " in text
    assert text.endswith(
        "this machine has 6 CPU and 2 GPU. Lower it, look at CUDA_VISIBLE_DEVICES, set runtime.ray.device = 'cpu'."
    )


SIX = {f"10.0.0.{n}": {"CPU": 8.0, "GPU": 3.0} for n in (1, 2)}
TOGETHER = [
    ({"a": 2, "b": 2, "c": 2}, {"a": "strict_pack", "b": "strict_pack", "c": "strict_pack"}, False),
    ({"a": 2, "b": 2, "c": 2}, {"a": "strict_pack", "b": "strict_pack"}, True),
    ({"a": 3, "b": 2}, {"a": "strict_pack", "b": "strict_spread"}, False),
    ({"a": 2, "b": 2}, {"a": "strict_pack", "b": "strict_spread"}, True),
    ({"a": 1, "b": 2, "c": 2}, {"a": "strict_pack", "b": "strict_pack", "c": "strict_spread"}, True),
    ({"a": 2, "b": 2, "c": 2}, {"a": "strict_spread", "b": "strict_spread", "c": "strict_spread"}, True),
]


@pytest.mark.parametrize(("sizes", "strategy", "fit"), TOGETHER)
def test_strategies_that_cannot_be_kept_together_are_refused(sizes, strategy, fit):
    """Each pool fits alone, and there are as many GPUs as are asked for."""
    pools = [Pool(name, range(size), ("actor",)) for name, size in sizes.items()]
    if fit:
        check(pools, RayOptions(strategy=strategy), True, SIX, "it")
        return
    text = refusal(pools, SIX, strategy=strategy)
    assert text.startswith("runtime.ray.strategy: a = ")
    assert ", ".join(f"{name} = '{kind}'" for name, kind in strategy.items()) in text
    assert text.endswith("Set one to 'pack' or 'spread', or lower placement.pools.")


def test_what_fits_together_is_what_a_search_of_all_places_finds():
    """Against every way to assign the processes of up to three pools to the rooms of up to three nodes."""
    random = Random(0)
    found = Counter()
    for _ in range(300):
        room = [random.randint(0, 3) for _ in range(random.randint(1, 3))]
        kinds = [random.choice(("pack", "strict_pack", "strict_spread")) for _ in range(random.randint(1, 3))]
        sizes = [random.randint(1, 3) for _ in kinds]
        names = [f"p{number}" for number in range(len(kinds))]
        pools = [Pool(name, range(size), ("actor",)) for name, size in zip(names, sizes, strict=True)]
        options = RayOptions(strategy=dict(zip(names, kinds, strict=True)))
        ways = searched(list(zip(kinds, sizes, strict=True)), room)
        try:
            nodes = {str(number): {"CPU": float(count)} for number, count in enumerate(room)}
            check(pools, options, False, nodes, "it")
        except ConfigError:
            assert not ways, (room, kinds, sizes)
            found["refused"] += 1
        else:
            assert ways, (room, kinds, sizes)
            found["taken"] += 1
    assert min(found.values()) > 50


def searched(pools, room):
    if not pools:
        return True
    (kind, size), *others = pools
    for places in combinations_with_replacement(range(len(room)), size):
        distinct = len(set(places))
        if (kind == "strict_pack" and distinct > 1) or (kind == "strict_spread" and distinct < size):
            continue
        left = [count - places.count(number) for number, count in enumerate(room)]
        if min(left) >= 0 and searched(others, left):
            return True
    return False


@pytest.mark.slow
def test_pools_that_are_hardest_to_place_are_placed_first(cluster):
    """In the order of the file the flexible pool may take what the strict one needs; groups are given in that of the pools."""
    from ray.util.placement_group import placement_group_table

    pools = [Pool("loose", range(1), ("actor",)), Pool("strict", range(1, 4), ("rollout",))]
    groups = reserve(pools, RayOptions(strategy={"strict": "strict_pack"}), False)
    try:
        tables = [placement_group_table(group) for group in groups]
        assert [(table["strategy"], len(table["bundles"])) for table in tables] == [
            ("PACK", 1),
            ("STRICT_PACK", 3),
        ]
    finally:
        release(groups)
    kinds = {"a": "spread", "b": "pack", "c": "strict_spread", "d": "strict_pack", "e": "strict_pack"}
    pools = [Pool(name, range(2 + (name == "e")), ("actor",)) for name in kinds]
    in_turn = sorted(pools, key=lambda pool: _order(pool, RayOptions(strategy=kinds)))
    assert "".join(pool.name for pool in in_turn) == "edcba"
