"""Placements that a cluster can never provide are refused, with the requests of each role and the
cluster's resources.
"""

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
