"""What a cluster can never give is refused, with what was asked by which role and what there is."""

import pytest
from engine_plugin_ray.placing import check
from engine_plugin_ray.plugin import RayOptions

from engine_core.errors import ConfigError
from engine_core.runtime.placement import Pool

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
