"""The model FLOPs utilization of a run's steps."""

import pytest

from engine_core.config import EngineConfig
from engine_plugin_tools import mfu
from engine_plugin_tools.mfu import StepMFU, device_rate

STEP = {
    "rollouts": 4.0,
    "tokens/total": 400.0,
    "tokens/generated": 240.0,
    "time/train": 2.0,
    "memory/actor/peak_gib": 1.0,
}


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """``smi("NVIDIA H200", ...)``: the driver's tool lists these GPUs."""

    def install(*names):
        tool = tmp_path / "nvidia-smi"
        lines = "\n".join(f"81559, {name}" for name in names)
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return install


def config(tiny_model, **algorithm):
    return EngineConfig.model_validate({"model": {"path": str(tiny_model)}, "algorithm": algorithm})


def test_the_rate_is_that_of_the_slowest_gpu_and_unknown_if_one_is_unknown(smi, monkeypatch):
    smi("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    assert device_rate() == 312e12
    smi("NVIDIA H100 80GB HBM3", "NVIDIA Something")
    assert device_rate() is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert device_rate() is None


def test_mfu_is_the_operations_of_the_update_over_time_rate_and_processes(tiny_model, monkeypatch):
    monkeypatch.setattr(mfu, "device_rate", lambda: 1e9)
    hidden, intermediate, layers, heads, kv_heads, size, vocabulary = 16, 24, 2, 2, 1, 8, 48
    body = layers * (hidden * size * 2 * (heads + kv_heads) + 3 * hidden * intermediate)
    operations = 6 * (body * 400 + vocabulary * hidden * 240 + layers * heads * size * 4 * 100 * 100)
    assert StepMFU(config(tiny_model)).of(STEP, 2) == {
        "throughput/mfu": pytest.approx(operations / 2 / 1e9 / 2)
    }
    twice = StepMFU(config(tiny_model, epochs=2)).of(STEP, 2)
    assert twice == {"throughput/mfu": pytest.approx(operations / 1e9 / 2)}
    supervised = {**STEP, "tokens/learned": 240.0}
    del supervised["rollouts"], supervised["tokens/generated"]
    operations = 6 * (
        body * 400 + vocabulary * hidden * 240 + layers * heads * size * 64 * 6.25**2
    )  # 64 rows
    found = StepMFU(config(tiny_model, epochs=2)).of(supervised, 1)  # `epochs` is of rollouts
    assert found == {"throughput/mfu": pytest.approx(operations / 2 / 1e9)}


def test_mfu_is_unknown_without_a_gpu_or_for_a_step_without_an_update(tiny_model, monkeypatch):
    assert StepMFU(config(tiny_model)).of(STEP, 1) == {}
    monkeypatch.setattr(mfu, "device_rate", lambda: 1e9)
    found = StepMFU(config(tiny_model))
    assert found.of({**STEP, "memory/actor/peak_gib": 0.0}, 1) == {}
    assert found.of({name: value for name, value in STEP.items() if name != "time/train"}, 1) == {}
