"""What a runtime is before it starts anything."""

import ast
import inspect
import itertools
import textwrap

import pytest
from engine_plugin_ray.runtime import RayRuntime

from engine_core import load_config
from engine_core.errors import ConfigError
from engine_core.runtime.base import Role
from engine_core.runtime.placement import plan_pools
from engine_core.trainer import Trainer

ROLES = {"actor": Role("train"), "rollout": Role("rollout")}


def kept(kind):
    """Attributes that the methods of a class itself set on an instance."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_what_the_runtime_keeps_has_other_names_than_what_the_classes_below_it_keep():
    """Workers are seats of Ray and seats of weights: of two things of one name, the one that is set last is taken for both."""
    classes = [kind for kind in RayRuntime.__mro__ if kind.__module__.startswith("engine_")]
    assert {"cluster", "store"} <= kept(RayRuntime)
    for one, other in itertools.combinations(classes, 2):
        assert not kept(one) & kept(other), f"{one.__name__} and {other.__name__}"


@pytest.fixture
def placed(no_cluster, settings):
    """A runtime whose pools are planned and whose workers are not started; the file names how weights go."""
    pools = {
        "placement.pools": {"train": 1, "serve": 2},
        "placement.actor": "train",
        "placement.rollout": "serve",
    }

    def make(**changes):
        given = settings | pools | {"runtime.backend": "ray", "algorithm.kl_coef": 0.0} | changes
        trainer = Trainer(load_config(given, allow_code=True))
        runtime = RayRuntime(trainer.config, trainer.plugins, {})
        runtime.pools = plan_pools(trainer.config, ROLES, 3)
        return runtime

    return make


@pytest.mark.parametrize("name", ["tcp", "broadcast", "ipc"])
def test_a_transport_that_the_file_names_is_taken_in_a_cluster_of_the_runs_own(placed, name):
    runtime = placed(**{"rollout.transport": name})
    runtime._check_transport(ROLES)
    assert runtime._transport == name


def test_memory_that_all_ends_see_is_refused_in_a_cluster_that_is_joined(placed):
    runtime = placed(**{"rollout.transport": "ipc", "runtime.ray.address": "10.0.0.1:6379"})
    with pytest.raises(
        ConfigError, match=r"^rollout\.transport: got 'ipc', which needs a run that has started all"
    ):
        runtime._check_transport(ROLES)
