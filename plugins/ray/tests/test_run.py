"""Whole runs on a cluster: those of the other runtimes, bit for bit."""

import pytest

pytestmark = pytest.mark.slow

RAY = {"runtime.backend": "ray"}
POOLS = {
    "placement.pools": {"train": 1, "serve": 1},
    "placement.actor": "train",
    "placement.rollout": "serve",
    "placement.ref": "serve",
}


def test_one_process_is_the_local_run_bit_for_bit(cluster, train):
    ours = train("ray", **RAY)
    assert ours == train("local")
    assert all(line["actor/grad_norm"] > 0 for line in ours["metrics"])


def test_actor_and_sampler_in_processes_of_their_own_train_as_in_one(cluster, train):
    """Weights go from actor to actor over a separate transport, here the one that the file names."""
    named = POOLS | {"rollout.transport": "tcp"}
    assert train("ray", **RAY, **named) == train("local", **{"rollout.weights": "own"})


def test_weights_go_through_memory_that_all_ends_see_in_a_cluster_of_the_runs_own(train_alone, train):
    """All its actors are on one machine; two of them copy the same buffers."""
    pools = {
        "placement.pools": {"train": 1, "serve": 2},
        "placement.actor": "train",
        "placement.rollout": "serve",
    }
    same = {"algorithm.kl_coef": 0.0, "rollout.weights": "own"}
    ours = train_alone("ray", **RAY, **pools, **same, **{"rollout.transport": "ipc"})
    assert ours == train("local", **same)


def test_two_sharded_ranks_are_those_of_torchrun_bit_for_bit(cluster, train):
    two = {"actor.backend": "fsdp", "rollout.weights": "own"}
    ours = train("ray", **RAY, **two, **{"runtime.ray.processes": 2})
    theirs = train("torchrun", **two, **{"runtime.backend": "torchrun", "runtime.torchrun.processes": 2})
    assert ours == theirs


def test_rollouts_run_ahead_as_with_torchrun(cluster, train):
    apart = {**POOLS, "trainer": "async"}
    assert train("ray", **RAY, **apart) == train("torchrun", **apart, **{"runtime.backend": "torchrun"})
