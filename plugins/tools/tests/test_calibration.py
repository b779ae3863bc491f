"""The ratios that plans keep, and the comparison of a run with its plan."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from engine_core.errors import DataError, EnvironmentProblem
from engine_plugin_tools import calibration
from engine_plugin_tools.calibration import (
    calibration_file,
    compare,
    counted,
    keep_ratios,
    measured_seconds,
    plan_check,
    read_ratios,
)
from engine_plugin_tools.time_plan import Phase, StepPlan


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "engine" / "plan.json"


def test_the_file_is_in_the_users_settings(file, monkeypatch, tmp_path):
    assert calibration_file() == file
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert calibration_file() == tmp_path / "home/.config/engine/plan.json"


def test_ratios_are_kept_by_device_and_phase(file):
    assert read_ratios("H200") == {}
    keep_ratios("H200", {"train.torch": 1.23456, "generate.vllm": 0.9})
    keep_ratios("cpu", {"train.torch": 3.0})
    keep_ratios("H200", {"train.torch": 1.5})
    assert read_ratios("H200") == {"train.torch": 1.5, "generate.vllm": 0.9}
    assert json.loads(file.read_text())["cpu"] == {"train.torch": 3.0}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"H200": 3}', '{"H200": {"train.torch": "much"}}', '{"H200": {"x": 0}}']
)
def test_a_damaged_file_is_named_with_what_to_do(file, text):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(DataError, match=r"plan\.json holds no ratios .* Delete it and calibrate again"):
        read_ratios("H200")
    with pytest.raises(DataError):
        keep_ratios("H200", {"train.torch": 1.0})
    assert file.read_text() == text


def test_a_file_that_cannot_be_written_is_named(file):
    file.parent.write_text("no folder")
    with pytest.raises(EnvironmentProblem, match=r"plan\.json cannot be written: .* XDG_CONFIG_HOME"):
        keep_ratios("H200", {"train.torch": 1.0})


def test_the_first_step_counts_only_alone():
    first, second, start = {"step": 1, "time/step": 9.0}, {"step": 2, "time/step": 1.0}, {"step": 0}
    assert counted([start, first, second]) == [second]
    assert counted([first]) == [first]


def test_seconds_are_medians_and_those_of_the_sampler_where_it_runs_ahead():
    lines = [{"time/step": float(n), "time/generate": 1.0, "time/sampling": 7.0} for n in (2, 3, 10)]
    assert measured_seconds(lines) == {"step": 3.0, "generate": 7.0, "sampling": 7.0}


def test_only_phases_with_a_plan_and_a_measurement_are_compared():
    phases = {
        "generate": Phase(1.0, 2.0, "", "vllm"),
        "reward": Phase(None, None, ""),
        "train": Phase(1.0, 4.0, "", "torch"),
        "sync": Phase(0.0, 0.0, "", "vllm"),
    }
    measured = {"generate": 3.0, "reward": 1.0, "sync": 0.1, "step": 9.0}
    assert compare(StepPlan(phases), measured) == {"generate.vllm": 1.5}


def test_a_plan_that_fails_does_not_fail_a_complete_run(monkeypatch, caplog):
    def fails(*facts):
        raise RuntimeError("broken")

    monkeypatch.setattr(calibration, "_compared", fails)
    with caplog.at_level(logging.INFO, logger="engine"):
        plan_check(SimpleNamespace(), [{"step": 1, "time/step": 1.0}])
    assert "could not be compared" in caplog.text
    assert "broken" in caplog.text
