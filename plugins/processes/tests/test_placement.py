"""Pools over ranks; what cannot be is refused with its keys."""

import pytest

from engine_core.config import EngineConfig
from engine_core.contracts.engines import Layout
from engine_core.errors import ConfigError, PluginError
from engine_plugin_processes.options import TorchrunOptions
from engine_plugin_processes.placement import (
    Slice,
    check_replaceable,
    plan_pools,
    problems,
    slices_of,
    wanted_processes,
)

RL = ("actor", "ref", "critic", "rollout")


def config(processes="auto", **placement):
    found = EngineConfig(placement=placement)
    found.runtime.backend = "torchrun"
    found.runtime.options = TorchrunOptions(processes=processes)
    return found


def test_without_pools_all_roles_are_in_one():
    (pool,) = plan_pools(config(), RL, 4)
    assert (list(pool.ranks), pool.roles) == ([0, 1, 2, 3], RL)


def test_roles_without_a_pool_of_their_own_are_with_the_actor():
    placed = config(pools={"serve": 1, "train": 2}, actor="train", rollout="serve")
    assert wanted_processes(placed) == 3
    serve, train = plan_pools(placed, RL, 3)
    assert (list(serve.ranks), serve.roles) == ([0], ("rollout",))
    assert (list(train.ranks), train.roles) == ([1, 2], ("actor", "ref", "critic"))
    placed = config(pools={"a": 1, "b": 1, "c": 1}, actor="a", rollout="b", ref="c")
    assert [pool.roles for pool in plan_pools(placed, RL, 3)] == [("actor", "critic"), ("rollout",), ("ref",)]


def test_a_role_that_placement_does_not_know_is_with_the_actor():
    placed = config(pools={"serve": 1, "train": 1}, actor="train", rollout="serve")
    assert [pool.roles for pool in plan_pools(placed, ("reward_model", "rollout"), 2)] == [
        ("rollout",),
        ("reward_model",),
    ]


def test_models_of_rewards_may_have_a_pool_of_their_own():
    roles = ("actor", "rollout", "reward.helpful", "reward.right")
    placed = config(pools={"train": 2, "judge": 1}, actor="train", rollout="train", reward="judge")
    assert [pool.roles for pool in plan_pools(placed, roles, 3)] == [roles[:2], roles[2:]]


@pytest.mark.parametrize(
    ("processes", "placement", "text"),
    [
        (
            "auto",
            {"pools": {"a": 1, "b": 2}, "actor": "a", "rollout": "a"},
            "placement.pools: no role is in pool b, which would idle. Remove it or use it.",
        ),
        (
            "auto",
            {"pools": {"train": 1}, "critic": "trian"},
            "placement.critic: got 'trian', expected a pool of placement.pools. Did you mean 'train'? Known: train.",
        ),
        (
            "auto",
            {"pools": {"a": 1, "b": 2}, "actor": "a"},
            "placement.rollout: missing. With several pools (a, b) each role must name its pool.",
        ),
        (
            2,
            {"pools": {"a": 1, "b": 2}, "actor": "a", "rollout": "b"},
            "placement.pools: { a = 1, b = 2 } need 3 processes, but runtime.torchrun.processes is 2. Make them agree, or "
            'set processes = "auto".',
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_with_its_key(processes, placement, text):
    assert list(problems(config(processes, **placement))) == [text]


def test_the_number_of_processes_is_what_the_file_says_or_left_open():
    assert wanted_processes(config()) is None
    assert wanted_processes(config(processes=3)) == 3
    assert wanted_processes(config(processes=3, pools={"a": 1, "b": 2})) == 3


def test_pools_that_others_started_too_few_for_are_refused():
    with pytest.raises(ConfigError, match=r"placement.pools: they need 3 processes, and 2 were started"):
        plan_pools(config(pools={"a": 3}), RL, 2)


def test_a_pool_without_a_role_is_refused():
    placed = config(pools={"a": 1, "b": 1}, actor="a", rollout="a")
    with pytest.raises(ConfigError, match="pool 'b' serves no role of this run"):
        plan_pools(placed, RL, 2)


def test_slices_are_the_ranks_of_one_data_parallel_rank():
    layouts = [Layout(0, 2, True), Layout(0, 2, False), Layout(1, 2, False), Layout(1, 2, True)]
    assert slices_of("actor", layouts, [4, 5, 6, 7]) == [Slice((4, 5), 4), Slice((6, 7), 7)]


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(), Layout()],  # two that think they are alone
        [Layout(0, 2), Layout(0, 2, False)],  # nobody is slice 1
        [Layout(0, 2), Layout(1, 2, False)],  # slice 1 has no leader
        [Layout(0, 2), Layout(1, 1)],
    ],
    ids=str,
)
def test_layouts_that_make_no_whole_are_the_plugins_fault(layouts):
    with pytest.raises(PluginError, match="layouts that do not fit together"):
        slices_of("actor", layouts, [0, 1])


@pytest.mark.parametrize(
    ("roles", "starts", "message"),
    [
        (("actor", "rollout"), False, "processes that another has started cannot be replaced"),
        (("actor", "ref", "rollout"), True, "only a sampler in a separate pool can be replaced; here its processes serve ref, rollout"),
    ],
)  # fmt: skip
def test_samplers_that_cannot_be_replaced_are_refused_by_key(roles, starts, message):
    placed = config(pools={"serve": 1, "train": 2}, actor="train", ref="serve", rollout="serve")
    with pytest.raises(ConfigError) as error:
        check_replaceable(placed, plan_pools(placed, roles, 3), starts)
    assert f"runtime.torchrun.max_replacements: {message}" in str(error.value)
