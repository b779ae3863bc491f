"""Runtimes of processes: what is left of a process that was begun while the run ended."""

import logging
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from engine_core.config import EngineConfig
from engine_core.contracts.runtime import Role
from engine_plugin_processes import runtime as module
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


def test_while_workers_start_the_log_tells_what_each_of_them_does(monkeypatch, caplog):
    monkeypatch.setattr(module, "REPORT_SECONDS", 0.01)
    reply, looks = Future(), []

    def at():
        looks.append(1)
        if len(looks) == 2:
            reply.set_result({0: "there"})
        return 7, 0.0

    slow = SimpleNamespace(rank=1, roles=("rollout",), newest="Loading weights: 40%", at=at)
    ready = SimpleNamespace(rank=0, roles=("actor",), newest="Building the role actor.", at=lambda: (0, 0.0))
    runtime = TorchrunRuntime(EngineConfig(runtime={"backend": "torchrun"}), None, {})
    runtime.crew = SimpleNamespace(workers={0: ready, 1: slow})
    with caplog.at_level(logging.INFO, logger="engine"):
        assert runtime._wait_for_start(reply) == {0: "there"}
    assert "rank 1 (rollout): Loading weights: 40%" in caplog.text
    assert "rank 0" not in caplog.text


def test_an_error_of_a_worker_that_starts_is_passed_on(monkeypatch):
    reply = Future()
    reply.set_exception(TimeoutError("of the worker"))
    runtime = TorchrunRuntime(EngineConfig(runtime={"backend": "torchrun"}), None, {})
    runtime.crew = SimpleNamespace(workers={})
    with pytest.raises(TimeoutError, match="of the worker"):
        runtime._wait_for_start(reply)
