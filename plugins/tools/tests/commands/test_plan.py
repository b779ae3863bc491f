"""engine plan, on a tiny model."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core.errors import ConfigError
from engine_plugin_tools.commands import plan
from engine_plugin_tools.commands.plan import DEVICES, find_devices, installed_bytes

GIB = 2**30


def test_the_plan_has_the_roles_of_the_run_with_their_bytes(engine, sft_run, tiny_model):
    answer = engine("plan", "run.toml", "--memory", "24", "--json")
    assert answer.code == 0, answer.err
    plan = json.loads(answer.out)
    (found,) = plan["pools"]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model))
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert found["device_bytes"] == 24 * GIB
    assert found["fits"]
    assert found["roles"]["actor"]["kept"]["weights"] == weights
    assert found["roles"]["actor"]["idle"]["optimizer"] == 2 * weights
    assert list(found["phases"]) == ["train"]
    assert plan["tokens"] == {"step": 4 * 4096, "run": 8 * 4096, "steps": 2}


@pytest.mark.parametrize("settings", [[], ["--set", "actor.lora.rank=4"]])
def test_the_bytes_of_a_checkpoint_are_those_of_its_files(engine, sft_run, tmp_path, settings):
    planned = json.loads(engine("plan", "run.toml", "--memory", "24", "--json", *settings).out)["disk"]
    assert engine("train", "run.toml", *settings).code == 0
    files = [*(tmp_path / "runs/first/checkpoints/step_00000002/actor").glob("*.safetensors")]
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    steps = planned["checkpoint_bytes"] - (sum(file.stat().st_size for file in files) - headers)
    assert -4 * 200 <= steps <= 0  # AdamW's step counts
    assert planned["kept"] == 2


def test_a_sampler_without_an_estimate_is_said_to_be_unknown(engine, rl_run):
    answer = engine("plan", "rl.toml", "--devices", "h200")
    assert answer.code == 0, answer.err
    assert "rollout  all" in answer.out
    assert "unknown" in answer.out
    assert "\nfits\n" in answer.out
    assert "disk: a checkpoint is " in answer.out


def test_what_does_not_fit_names_the_phase_and_ends_with_2(engine, sft_run):
    answer = engine("plan", "run.toml", "--memory", "0.3")
    assert answer.code == 2
    assert (
        "The memory of the device (0.30 GiB) does not suffice, by estimate: phase 'train' needs" in answer.out
    )


def test_devices_are_named_with_their_number(monkeypatch):
    assert find_devices("h200x2", None) == (int(DEVICES["h200"] * GIB), 2)
    assert find_devices("RTX4090", None) == (int(DEVICES["rtx4090"] * GIB), 1)
    assert find_devices("x4", 24) == (24 * GIB, 4)
    monkeypatch.setattr(plan, "installed_bytes", lambda: [80 * GIB, 40 * GIB])
    assert find_devices(None, None) == (40 * GIB, 2)


def test_a_device_that_is_unknown_or_absent_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"--devices 'h20x2' is not known\. Did you mean 'h200'\?"):
        find_devices("h20x2", None)
    monkeypatch.setattr(plan, "installed_bytes", list)
    with pytest.raises(ConfigError, match=r"This machine reports no GPU\. Name the devices"):
        find_devices(None, None)


def test_the_drivers_tool_is_asked_for_the_memory(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 143771\necho 81559\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed_bytes() == [143771 * 2**20, 81559 * 2**20]
    tool.unlink()
    assert installed_bytes() == []
