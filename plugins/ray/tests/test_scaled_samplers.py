"""Samplers of a run on Ray come and leave as ``engine scale`` says, wait for room, and leave none of it held."""

import logging
import os
import signal
import time

import pytest

from engine_core.cli.main import main
from engine_core.config import EngineConfig
from engine_core.runs.rollout_files import read_rollouts
from engine_core.train.rollouts import RolloutSource
from engine_core.train.trainer import Trainer
from engine_plugin_processes.placement import Pool
from engine_plugin_processes.replacement import Replacements
from engine_plugin_ray import runtime as module
from engine_plugin_ray.handle import ActorHandle
from engine_plugin_ray.plugin import RayOptions
from engine_plugin_ray.runtime import RayRuntime
from engine_plugin_trainers.async_trainer import AsyncTrainer

slow = pytest.mark.slow
GROWING = {
    "runtime.backend": "ray",
    "placement.pools": {"serve": 1, "train": 1},
    "placement.max_samplers": {"serve": 3},
    "placement.actor": "train",
    "placement.rollout": "serve",
    "rollout.hf.batch_size": 2,
    "algorithm.kl_coef": 0.0,
    "tracking.rollouts_every_steps": 1,
}
SECONDS = 120.0
CPUS = 4  # of the cluster of these tests


def until(found):
    deadline = time.monotonic() + SECONDS
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def free():
    """CPUs that nobody holds."""
    import ray

    return ray.available_resources().get("CPU", 0)


@pytest.fixture
def wishes(monkeypatch):
    """What happens before the updates to some policy versions: a number is one that a user types."""
    sync, typed = RolloutSource.sync, {}

    def typing(source, updated=True):
        wish = typed.pop(source.version + updated, None) if updated else None
        if callable(wish):
            wish()
        elif wish is not None:
            assert main(["scale", str(source.run.folder.path), str(wish)]) == 0
        return sync(source, updated)

    monkeypatch.setattr(RolloutSource, "sync", typing)
    yield typed
    assert not typed


@pytest.fixture
def awaited(monkeypatch):
    """Each update waits for those that are to come."""
    change = Replacements.change

    def waiting(replacements):
        replacements._adjust()
        until(lambda: not set(replacements._coming) - set(replacements._ready))
        return change(replacements)

    monkeypatch.setattr(Replacements, "change", waiting)


@pytest.fixture
def known(monkeypatch):
    """Who keeps account of a run's samplers; of each run."""
    made, init = [], Replacements.__init__

    def noting(replacements, *arguments, **settings):
        init(replacements, *arguments, **settings)
        made.append(replacements)

    monkeypatch.setattr(Replacements, "__init__", noting)
    return made


@pytest.fixture
def actors(monkeypatch):
    """Handles of the actors, as they come."""
    made, init = [], ActorHandle.__init__

    def noting(handle, *arguments):
        init(handle, *arguments)
        made.append(handle)

    monkeypatch.setattr(ActorHandle, "__init__", noting)
    return made


def of(result, name):
    return [line[f"sampling/{name}"] for line in result["metrics"]]


def samples(folder):
    return {
        file.name: sorted(each.request_id for each in read_rollouts(file))
        for file in sorted(folder.rglob("*.parquet"))
    }


@slow
@pytest.mark.parametrize(("trainer", "kind"), [("rl", Trainer), ("async", AsyncTrainer)])
def test_samplers_come_and_leave_and_give_their_room_back(
    cluster, train, tmp_path, wishes, awaited, actors, trainer, kind
):
    how = GROWING | {"trainer": trainer, "run.steps": 6, "rollout.transport": "tcp"}
    if trainer == "async":  # else a step takes whichever groups are ready first
        how["async.order"] = "admitted"
    until(lambda: free() == CPUS)
    wishes |= {1: 2, 2: 3, 3: lambda: until(lambda: free() == 0), 4: 1, 5: lambda: until(lambda: free() == 2)}
    found = train("scaled", kind, **how)
    assert of(found, "samplers") == [2, 3, 3, 1, 1, 1]
    assert of(found, "joined") == [1, 1, 0, 0, 0, 0]
    assert of(found, "left") == [0, 0, 0, 2, 0, 0]
    assert of(found, "lost") == [0] * 6
    assert len(actors) == 4
    until(lambda: free() == CPUS)
    train("straight", kind, **how)
    runs = tmp_path / "runs"
    assert samples(runs / "scaled" / "rollouts") == samples(runs / "straight" / "rollouts")


@slow
def test_who_finds_no_room_waits_while_the_run_goes_on_and_comes_when_there_is_some(
    cluster, train, wishes, known, caplog
):
    from ray.util.placement_group import placement_group, remove_placement_group

    until(lambda: free() == CPUS)
    others = placement_group([{"CPU": 2}])
    assert others.wait(30)
    full = "Ray has no room for another sampler now (1 CPU)"

    def make_room():
        until(lambda: full in caplog.text)
        remove_placement_group(others)

    def ready():
        until(lambda: known[-1]._ready)

    wishes |= {1: 2, 2: make_room, 4: ready, 6: 1}
    with caplog.at_level(logging.INFO, "engine"):
        found = train("full", **GROWING, **{"run.steps": 6})
    assert of(found, "samplers")[:2] == [1, 1]
    assert of(found, "samplers")[3:] == [2, 2, 1]
    assert caplog.text.count(full) == 1
    until(lambda: free() == CPUS)


@slow
def test_a_wish_that_never_finds_room_ends_with_the_run(cluster, train, wishes, caplog):
    until(lambda: free() == CPUS)
    wishes |= {1: 5, 2: lambda: until(lambda: "Ray has no room" in caplog.text)}
    with caplog.at_level(logging.INFO, "engine"):
        found = train("greedy", **GROWING | {"placement.max_samplers": {"serve": 5}, "run.steps": 3})
    assert max(of(found, "samplers")) <= 3
    until(lambda: free() == CPUS)


@slow
@pytest.mark.chaos
def test_one_that_came_and_is_lost_leaves_its_room(cluster, train, wishes, awaited, actors, caplog):
    until(lambda: free() == CPUS)

    def kill():
        os.kill(actors[-1].pid, signal.SIGKILL)
        until(lambda: "Samplers wanted now: 1" in caplog.text)
        until(lambda: free() == 2)

    wishes |= {1: 2, 2: kill, 4: 2}
    with caplog.at_level(logging.INFO, "engine"):
        found = train("lost", **GROWING, **{"run.steps": 5})
    assert of(found, "samplers") == [2, 1, 1, 2, 2]
    assert sum(of(found, "lost")) == 1
    until(lambda: free() == CPUS)


def test_one_that_is_lost_is_replaced_in_room_that_the_cluster_has_then(monkeypatch):
    """Its own may be on a node that was lost with it, and Ray may not know that yet."""
    placement = {
        "pools": {"serve": 1, "train": 1},
        "max_samplers": {"serve": 2},
        "actor": "train",
        "rollout": "serve",
    }
    config = EngineConfig(placement=placement, runtime={"backend": "ray"})
    config.runtime.options = RayOptions()
    runtime, given = RayRuntime(config, None, {}), []
    runtime.pools = [Pool("serve", range(2), ("rollout",), 1), Pool("train", range(2, 3), ("actor",))]
    runtime._rooms = {0: "of 0", 1: "on the lost node"}
    monkeypatch.setattr(module, "release", given.extend)
    monkeypatch.setattr(module, "room_for_one", lambda *_: "elsewhere")
    monkeypatch.setattr(RayRuntime, "_one_machine", lambda self: True)
    monkeypatch.setattr(
        RayRuntime, "_take_seats", lambda self, ranks: dict.fromkeys(ranks, self._rooms[ranks[0]])
    )
    assert runtime._begin_again(1, lambda: True) == "elsewhere"
    assert (given, runtime._rooms[0]) == (["on the lost node"], "of 0")
