"""Runtimes of processes: processes that begin while the run ends, and profiles of steps that fail."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_core.config import EngineConfig
from engine_core.contracts.runtime import Role
from engine_plugin_processes.options import TorchrunOptions
from engine_plugin_processes.placement import Pool
from engine_plugin_processes.torchrun import TorchrunRuntime
from engine_plugin_processes.worker_process import WorkerHandle


def test_a_process_that_is_begun_while_the_run_ends_is_not_left_behind(monkeypatch):
    """The folder in which it would meet others is gone by the time that it is there."""
    placement = {
        "pools": {"train": 1, "serve": 1},
        "actor": "train",
        "rollout": "serve",
    }
    config = EngineConfig(placement=placement, runtime={"backend": "torchrun"})
    config.runtime.options = TorchrunOptions()
    runtime = TorchrunRuntime(config, None, {})
    runtime.pools = [Pool("serve", range(2), ("rollout",)), Pool("train", range(2, 3), ("actor",))]
    runtime.crew, started, start = SimpleNamespace(), [], WorkerHandle.start.__func__

    def noting(cls, rank, env):
        started.append(start(cls, rank, env))
        return started[-1]

    monkeypatch.setattr(WorkerHandle, "start", classmethod(noting))
    begin = runtime._replacing({}, Role("rollout")).begin
    with pytest.raises(AssertionError):
        begin(1, 1)
    try:
        assert started[0].process.popen.poll() is not None
    finally:
        started[0].kill()


class Crew:
    """Workers that note the folders of their profiles; ``broken``: they do not end one."""

    broken = False

    def __init__(self):
        self.sent = []

    def send(self, messages, what):
        self.sent.append({rank: message["folder"] for rank, message in messages.items()})
        reply = Future()
        if self.broken and len(self.sent) == 2:
            reply.set_exception(OSError("No space left"))
        else:
            reply.set_result(None)
        return reply


@pytest.fixture
def profiling():
    runtime = TorchrunRuntime(EngineConfig(runtime={"backend": "torchrun"}), None, {})
    runtime.pools, runtime.crew = [Pool("all", range(3), ("actor", "rollout"))], Crew()
    return runtime


@pytest.mark.parametrize("broken", [False, True])
def test_the_profile_of_a_step_that_fails_ends_with_it_and_does_not_hide_its_error(profiling, caplog, broken):
    profiling.crew.broken = broken
    with pytest.raises(MemoryError, match="the step"), profiling.profiled(Path("profile")):
        raise MemoryError("the step")
    assert profiling.crew.sent == [dict.fromkeys(range(3), "profile"), dict.fromkeys(range(3), "")]
    assert ("may lack files: No space left" in caplog.text) == broken


def test_a_stop_does_not_wait_for_the_files_of_a_profile(profiling):
    with pytest.raises(KeyboardInterrupt), profiling.profiled(Path("profile")):
        raise KeyboardInterrupt
    assert len(profiling.crew.sent) == 1


def test_a_rank_that_is_lost_is_not_profiled(profiling):
    profiling.replacements = SimpleNamespace(away={1})
    with profiling.profiled(Path("profile")):
        pass
    assert profiling.crew.sent == [{0: "profile", 2: "profile"}, {0: "", 2: ""}]
