"""Weights that never leave the GPU: buckets of device memory that the sampler's process opens (CUDA IPC)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from engine_core.config import ModelConfig, RolloutConfig
from engine_core.config.roles import ProcessConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Prompt, Request, Sampling
from engine_plugin_processes.sampler_process.engine import SamplerEngine
from engine_plugin_processes.transports import bucketing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HERE = Path(__file__).parents[2] / "plugins" / "processes" / "tests"


def stream(value):
    return iter(
        [(n, torch.full((size,), float(value), device="cuda")) for n, size in (("a", 300), ("b", 70_000))]
    )


@pytest.fixture
def make(tmp_path):
    made = []

    def start(**how):
        made.append(_engine(tmp_path, **how))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make):
    made = make(source=lambda: stream(made.version))
    return made


def _engine(tmp_path, source):
    plugins = PluginSet.load({"rollout_engines": {"counting"}}, ["counting_plugin.py"], HERE)
    options = plugins.spec("rollout_engines", "counting").config(
        starts=str(tmp_path / "starts"), any_weight=True
    )
    config = RolloutConfig(backend="counting", options=options, process=ProcessConfig())
    context = WorkerContext(plugins=plugins, role="rollout", device=torch.device("cuda", 0))
    return SamplerEngine(config, ModelConfig(), context, source).build(config)


def sampled(engine):
    asked = [Request(f"r{i}", Prompt(f"p{i}", [3, 4], ""), Sampling(), i) for i in range(3)]
    return [
        (r.rollout_log_probs.tolist()[-1], r.policy_versions.tolist()[-1]) for r in engine.generate(asked)
    ]


def test_updates_go_through_device_memory_also_larger_ones_and_to_a_new_process(
    engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        bucketing, "BUCKET_BYTES", 2000
    )  # several buckets, the last larger than the first buffer
    first = engine.update_weights(stream(1), 1)
    assert engine._weights._link[1].on_device
    assert sampled(engine) == [(-1.0, 1)] * 3
    assert engine.update_weights(stream(2), 2) != first
    assert sampled(engine) == [(-2.0, 2)] * 3
    os.kill(int((tmp_path / "starts").read_text().split()[-1]), signal.SIGKILL)
    assert sampled(engine) == [(-2.0, 2)] * 3  # of the new process, streamed again
    assert engine.update_weights(stream(1), 3) == first


def test_without_a_source_a_new_process_gets_the_copy_that_was_kept_in_host_memory(
    make, tmp_path, monkeypatch
):
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", 2000)
    engine = make(source=None)
    for version in (1, 2):
        engine.update_weights(stream(version), version)
        assert sampled(engine) == [(-float(version), version)] * 3
    assert {tensor.device.type for _, tensor in engine._weights._kept} == {"cpu"}
    os.kill(int((tmp_path / "starts").read_text().split()[-1]), signal.SIGKILL)
    assert sampled(engine) == [(-2.0, 2)] * 3


def test_a_large_model_is_sent_and_the_seconds_are_recorded(engine, record_property):
    """Send 1.2 GB of bfloat16, as many bytes as a model of 0.6B has, through device memory and over a connection."""
    big = [(f"w{i}", torch.randn(40_000_000, device="cuda").bfloat16()) for i in range(15)]
    for transport in ("ipc", "tcp"):
        engine._weights.close()
        engine._weights.transport = transport
        for attempt in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            engine.update_weights(iter([*stream(4), *big]), 4)
            seconds = time.perf_counter() - start
            record_property(f"{transport} {attempt}", seconds)
            print(f"{transport}: {seconds:.3f} s")
        assert sampled(engine) == [(-4.0, 4)] * 3
