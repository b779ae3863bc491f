"""MFU and the share of the floor of a run's steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_core import load_config
from engine_core.config.assemble import plugins_for
from engine_plugin_tools import floors
from engine_plugin_tools.devices import Device, Limits
from engine_plugin_tools.floors import StepFloors

STEP = {
    "tokens/total": 400.0,
    "tokens/learned": 240.0,
    "time/train": 2.0,
    "time/step": 4.0,
    "memory/actor/peak_gib": 1.0,
}


@pytest.fixture
def run(sft_run, monkeypatch):
    """The trainer of a supervised run of 4 rows a step, on a device of 1 GFLOP/s."""
    monkeypatch.setattr(floors, "installed_devices", lambda: [Device("H200", 1 << 36)])
    monkeypatch.setattr(floors, "find_devices", lambda name, memory: Device("H200", 1 << 36))
    monkeypatch.setattr(Limits, "of", classmethod(lambda cls, name: Limits(name, 1e9, 1e9)))
    config = load_config(sft_run)
    made = plugins_for(config).resolve("trainers", "sft")(config)
    made.load_inputs()
    monkeypatch.setattr(type(made), "trained_roles", ["actor"])
    made.groups["actor"] = SimpleNamespace(world_size=1)
    return made


def test_mfu_is_the_operations_of_the_update_over_time_and_rate(run):
    hidden, intermediate, layers, heads, kv_heads, size, vocabulary = 16, 24, 2, 2, 1, 8, 48
    body = layers * (hidden * size * 2 * (heads + kv_heads) + 3 * hidden * intermediate)
    # rows of 40 + 60 tokens; responses no longer than the longest
    seen = 4 * (40**2 + 2 * 40 * 60 + min(2 * 60, 100) * 60)
    operations = 6 * (body * 400 + vocabulary * hidden * 240 + layers * heads * size * seen)
    found = StepFloors(run).of(STEP)
    assert found == {
        "throughput/mfu": pytest.approx(operations / 2 / 1e9),
        "throughput/floor_share": pytest.approx(operations / 4 / 1e9),
    }


def test_they_are_unknown_on_a_cpu_and_for_a_step_without_an_update(run, monkeypatch):
    assert StepFloors(run).of({**STEP, "memory/actor/peak_gib": 0.0}) == {}
    assert "throughput/mfu" not in StepFloors(run).of({**STEP, "time/train": 0.0})
    monkeypatch.setattr(floors, "installed_devices", lambda: [])
    assert StepFloors(run).of(STEP) == {}


def test_a_plan_that_fails_is_logged_once_and_ends_no_run(run, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no plan")

    monkeypatch.setattr(floors, "plans_of", broken)
    found = StepFloors(run)
    assert found.of(STEP) == found.of(STEP) == {}
    assert caplog.text.count("MFU and the floor of steps are unknown") == 1
