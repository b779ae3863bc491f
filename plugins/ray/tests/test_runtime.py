"""A runtime before it starts anything."""

import ast
import inspect
import itertools
import textwrap

import pytest
import torch
from ray.exceptions import GetTimeoutError, RayError

from engine_core import load_config
from engine_core.contracts.runtime import Role
from engine_core.errors import ConfigError
from engine_core.train.trainer import Trainer
from engine_plugin_processes.placement import plan_pools
from engine_plugin_processes.transports.choice import choose
from engine_plugin_ray import runtime as module
from engine_plugin_ray.runtime import RayRuntime

ROLES = {"actor": Role("train"), "rollout": Role("rollout")}


def kept(kind):
    """Return the attributes that the methods of a class itself set on an instance."""
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
    assert {"cluster", "_seats"} <= kept(RayRuntime)
    for one, other in itertools.combinations(classes, 2):
        assert not kept(one) & kept(other), f"{one.__name__} and {other.__name__}"


@pytest.fixture
def placed(no_cluster, settings):
    """Return a function that makes a runtime with planned pools, whose workers are not started."""
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
    topology = runtime._topology(runtime._pool("actor"), runtime._pool("rollout"))
    assert choose(runtime.config, topology) == name


def test_memory_that_all_ends_see_is_refused_in_a_cluster_that_is_joined(placed):
    runtime = placed(**{"rollout.transport": "ipc", "runtime.ray.address": "10.0.0.1:6379"})
    with pytest.raises(
        ConfigError, match=r"^rollout\.transport: got 'ipc', which needs a run that has started all"
    ):
        runtime._check_transport(ROLES)


def test_more_accelerators_than_this_machine_has_are_refused_with_the_roles_that_ask(placed, monkeypatch):
    monkeypatch.setattr(module, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ConfigError) as caught:
        placed().start(ROLES, 1)
    assert str(caught.value) == (
        "placement.pools: train = 1 (actor), serve = 2 (rollout) asks for 1 CPU and 1 GPU a process; the cluster of this "
        "machine has room for 2 processes: this machine has 3 CPU and 2 GPU. Lower it, look at CUDA_VISIBLE_DEVICES, set "
        "runtime.ray.device = 'cpu'."
    )


def test_what_a_node_cannot_import_is_said_with_the_node_and_without_a_traceback():
    told = (
        "\x1b[36mray::Seat.__init__()\x1b[39m (pid=1, ip=10.0.0.2, actor_id=ab, repr=<Seat>)\n"
        '  File "default_worker.py", line 1, in load\n    ^^^^^^\n'
        "ModuleNotFoundError: No module named 'engine_plugin_ray'"
    )
    assert module._no_seat(RayError(told)) == (
        "The node 10.0.0.2 cannot import what the run needs: No module named 'engine_plugin_ray'. Install engine-plugin-ray "
        "and the run's other plugins in the environment of every node."
    )
    assert module._no_seat(RayError("died\nsoon")) == (
        "A worker ended before it had started: RayError: died soon"
    )
    assert "within runtime.ray.startup_timeout_minutes. Raise it" in module._no_seat(GetTimeoutError("late"))
