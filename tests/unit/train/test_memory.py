"""What a step says that had no memory; what is not looked through for garbage."""

import gc
import os
import subprocess
import sys
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from engine_core.config import EngineConfig
from engine_core.contracts.runtime import Role
from engine_core.errors import EnvironmentProblem
from engine_core.train.memory import (
    _SET_BY_USER,
    SHARE,
    frozen_gc,
    keep_freed_memory,
    out_of_memory_explained,
)
from engine_plugin_processes.remote_errors import pack, unpack

ROLES = {"actor": Role("train"), "ref": Role("train", trainable=False), "rollout": Role("rollout")}


def told(error, samples=True):
    config = EngineConfig.model_validate({"actor": {"max_tokens_per_rank": 77}})
    run = SimpleNamespace(step_now=4, config_now=config, samples=samples, roles=lambda training: ROLES)
    with pytest.raises(EnvironmentProblem) as caught, out_of_memory_explained(run):
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


def test_other_errors_pass():
    with pytest.raises(ValueError, match="else"), out_of_memory_explained(None):
        raise ValueError("something else")


@pytest.fixture
def thawed():
    """Nothing is frozen, as in a program of its own."""
    gc.unfreeze()
    yield
    assert not gc.get_freeze_count()
    gc.freeze()


class InACircle:
    def __init__(self):
        self.itself = self


def test_while_a_run_goes_on_the_collector_leaves_out_what_was_there_and_finds_what_is_new(thawed):
    found = []
    old, before = InACircle(), gc.get_freeze_count()
    assert not before
    with frozen_gc(time.perf_counter):
        assert gc.get_freeze_count() > 10_000
        assert not any(each is old for each in gc.get_objects())
        new = InACircle()
        weakref.finalize(new, found.append, "new")
        del new
        gc.collect()
        assert found == ["new"]
    assert not gc.get_freeze_count()
    weakref.finalize(old, found.append, "old")
    del old
    gc.collect()
    assert found == ["new", "old"]


@pytest.mark.parametrize(
    ("before", "within"), [((700, 11, 12), 500_000), ((600_000, 11, 12), 600_000), ((0, 11, 12), 0)]
)
def test_while_a_run_goes_on_the_collector_looks_less_often_unless_it_was_told_so_already(
    thawed, before, within
):
    told = gc.get_threshold()
    gc.set_threshold(*before)
    try:
        with frozen_gc(time.perf_counter):
            assert gc.get_threshold() == (within, 11, 12)
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*told)


def test_between_steps_all_that_has_come_is_looked_through_as_often_as_a_part_of_the_time_allows(thawed):
    found, seconds = [], 100.0
    with frozen_gc(lambda: seconds) as look:
        for name in ("first", "second"):
            new = InACircle()
            weakref.finalize(new, found.append, name)
            gc.collect()  # it outlives one look
            del new
            began = time.perf_counter()
            look()
            took = time.perf_counter() - began
            assert name in found
            new = InACircle()
            weakref.finalize(new, found.append, f"soon after {name}")
            del new
            look()
            assert f"soon after {name}" not in found
            seconds += took / SHARE


@pytest.mark.parametrize("switch_off", [gc.disable, lambda: gc.set_threshold(0)])
def test_whoever_has_switched_the_collector_off_has_it_off(thawed, switch_off):
    told = gc.get_threshold()
    try:
        switch_off()
        with frozen_gc(time.perf_counter) as look:
            kept = InACircle()
            gone = weakref.ref(kept)
            del kept
            look()
            assert gone() is not None
    finally:
        gc.set_threshold(*told)
        gc.enable()
        gc.collect()


def test_what_somebody_else_has_frozen_stays_so(thawed):
    gc.freeze()
    try:
        count = gc.get_freeze_count()  # what is frozen may still be freed; what is new must not join it
        new = [[] for _ in range(10_000)]
        with frozen_gc(time.perf_counter):
            assert count - len(new) < gc.get_freeze_count() <= count
        assert count - len(new) < gc.get_freeze_count() <= count
    finally:
        gc.unfreeze()


def test_a_run_that_fails_has_its_objects_looked_through_again(thawed):
    with pytest.raises(KeyError), frozen_gc(time.perf_counter):
        raise KeyError
    assert not gc.get_freeze_count()


FREES = """
import resource, sys
import torch
from engine_core.train.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    held = [torch.ones(10_000_000) for _ in range(3)]  # 40 MB each: more than glibc keeps by itself
for _ in range(8):  # until there is as much as it takes
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages(keep, **settings):
    """New ones in five steps, in a process of its own."""
    told = {
        name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "LD_PRELOAD"
    }
    command = [sys.executable, "-c", FREES, keep]
    done = subprocess.run(
        command, env=told | settings, capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc: the C library of most Linux systems")
def test_what_a_step_frees_is_there_for_the_next_one_unless_the_environment_says_how():
    most = 5 * 3 * 40_000_000 // os.sysconf("SC_PAGE_SIZE")
    assert pages("keep") < most / 20
    assert pages("not") > most / 2
    assert pages("keep", MALLOC_TRIM_THRESHOLD_="131072") > most / 2


@pytest.mark.parametrize(
    ("most", "set_to"),
    [(1 << 40, {-3: 128 << 20, -1: 512 << 20}), (32 << 20, {-3: 32 << 20, -1: 512 << 20}), (0, {})],
    ids=["glibc 2.35 and newer", "glibc before 2.35", "none of it"],
)
def test_what_is_kept_is_set_only_where_the_size_of_a_block_is(monkeypatch, most, set_to):
    found = {}

    class Library:
        """malloc.c: a threshold above the most is refused with 0; either one ends what it learns by itself."""

        def mallopt(self, number, value):
            if number == -3 and value > most:
                return 0
            found[number] = value
            return 1

    monkeypatch.setattr("ctypes.CDLL", lambda name: Library())
    for name in _SET_BY_USER:
        monkeypatch.delenv(name, raising=False)
    keep_freed_memory()
    assert found == set_to
