"""The message of a step that had no memory, the save at an early end, and garbage collection while steps run."""

import gc
import signal
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from engine_core.config import EngineConfig
from engine_core.errors import ConfigError, EnvironmentProblem, PluginError
from engine_core.train.loop import Loop, frozen_gc, out_of_memory_explained
from engine_core.train.stopping import Stop
from engine_plugin_processes.remote_errors import pack, unpack


def told(error, samples=True):
    config = EngineConfig.model_validate({"actor": {"max_tokens_per_rank": 77}})
    with pytest.raises(EnvironmentProblem) as caught, out_of_memory_explained(4, config, ["actor"], samples):
        raise error
    assert caught.value.__cause__ is error
    return str(caught.value)


def test_the_key_of_each_trained_role_is_named_with_its_value_and_the_way_on():
    text = told(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"))
    assert text.startswith("Out of memory in step 4: CUDA out of memory. Tried to allocate 2.00 GiB. Lower ")
    assert "Lower actor.max_tokens_per_rank (now 77); if one sequence" in text
    assert "ref." not in text
    assert "rollout.max_response_tokens" in text
    assert "engine resume" in text
    assert "rollout." not in told(MemoryError("no room"), samples=False)


def test_of_a_worker_the_rank_is_named():
    text = told(unpack(pack(torch.OutOfMemoryError("17 GiB")), 3))
    assert text.startswith("Out of memory on rank 3 in step 4: 17 GiB")


def test_the_memory_of_the_host_is_named_too():
    text = told(
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
        )
    )
    assert text.startswith("Out of memory in step 4: [enforce fail] DefaultCPUAllocator")


@pytest.mark.parametrize("error", [ValueError, RuntimeError, NotImplementedError])
def test_other_errors_pass(error):
    with pytest.raises(error, match="else"), out_of_memory_explained(1, EngineConfig(), ["actor"], True):
        raise error("something else")


@pytest.fixture
def failing(monkeypatch):
    """``failing(error)``: a loop whose save raises this error."""

    def make(error):
        def save(must):
            raise error

        loop = Loop.__new__(Loop)
        loop.run = SimpleNamespace(runtime=SimpleNamespace(give_up=lambda: None))
        loop.saver = SimpleNamespace(config=SimpleNamespace(at_stop=True))
        monkeypatch.setattr(loop, "save", save)
        return loop

    return make


def test_a_stop_that_finds_a_full_disk_saves_nothing(failing, caplog):
    assert failing(EnvironmentProblem("The disk is full.")).save_for(Stop(signal.SIGTERM)) is False
    assert caplog.messages == ["The disk is full."]


def test_a_bug_in_the_save_at_a_stop_is_raised(failing):
    with pytest.raises(PluginError, match="broken"):
        failing(PluginError("broken")).save_for(Stop(signal.SIGTERM))


def test_the_loss_of_a_sampler_is_reported_whatever_its_save_raises(failing, caplog):
    assert failing(PluginError("broken")).save_finished_step() is False
    assert caplog.messages == ["broken"]


def test_a_trainer_may_sample_without_a_count_of_the_tokens():
    loop = Loop.__new__(Loop)
    loop.run = SimpleNamespace(times={"generate": 2.0})
    assert loop._throughput({}) == {}
    generated = "throughput/generated_tokens_per_second"
    assert loop._throughput({"tokens/generated": 6.0}) == {generated: 3.0}


@pytest.fixture
def nothing_frozen():
    """Undo the freeze of conftest.py, as in a program of its own."""
    gc.unfreeze()
    yield
    assert not gc.get_freeze_count()
    gc.freeze()


class Cycle:
    def __init__(self):
        self.itself = self


def test_garbage_collection_ignores_older_objects_while_steps_run(nothing_frozen):
    found = []
    old = Cycle()
    with frozen_gc():
        assert not any(each is old for each in gc.get_objects())
        new = Cycle()
        weakref.finalize(new, found.append, "new")
        del new
        gc.collect()
        assert found == ["new"]
    weakref.finalize(old, found.append, "old")
    del old
    gc.collect()
    assert found == ["new", "old"]


@pytest.mark.parametrize(("before", "within"), [(700, 500_000), (600_000, 600_000), (0, 0)])
def test_garbage_collection_runs_less_often_while_steps_run(nothing_frozen, before, within):
    usual = gc.get_threshold()
    gc.set_threshold(before, 11, 12)
    try:
        with frozen_gc():
            assert gc.get_threshold() == (within, 11, 12)
        assert gc.get_threshold() == (before, 11, 12)
    finally:
        gc.set_threshold(*usual)


LATE = ("stage/replay_cache/age_max", "logps/chosen")


@pytest.mark.parametrize("name", ["reward/meen", "actor/kl", "stage/no_stage/age_max", *LATE])
def test_a_metric_that_no_step_measures_is_refused_or_if_a_later_step_may_measure_it_logged_once(
    name, caplog
):
    loop = Loop.__new__(Loop)
    config = EngineConfig.model_validate(
        {"run": {"fail_above": {name: 1.0}}, "stage": [{"name": "replay_cache"}]}
    )
    loop.run, loop._measured = SimpleNamespace(config=config, late_metrics=("logps/",)), set()
    loop._missed = set()
    for _ in range(2):
        with (
            nullcontext() if name in LATE else pytest.raises(ConfigError, match=f"no step measures '{name}'")
        ):
            loop.check_bounds({"actor/loss": 0.5, "reward/mean": 1.0})
    assert caplog.text.count(f"no step measures '{name}'") == (name in LATE)
