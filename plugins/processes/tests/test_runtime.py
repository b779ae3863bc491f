"""Runtimes of processes: what is left of a process that was begun while the run ended."""

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
