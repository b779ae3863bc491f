"""engine plan, on a tiny model."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from engine_plugin_tools import calibration

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


def test_the_best_checkpoints_are_kept_in_addition_to_the_last(engine, sft_run):
    best = ["--set", "checkpoint.best_metric=actor/loss", "--set", "checkpoint.keep_best=5"]
    planned = engine("plan", "run.toml", "--memory", "24", "--json", *best)
    assert json.loads(planned.out)["disk"]["kept"] == 2 + 5


def test_a_sampler_without_an_estimate_is_said_to_be_unknown(engine, rl_run):
    answer = engine("plan", "rl.toml", "--devices", "h200")
    assert answer.code == 0, answer.err
    assert "rollout  all" in answer.out
    assert "unknown" in answer.out
    assert "\nfits\n" in answer.out
    assert "disk: a checkpoint is " in answer.out


def test_devices_that_the_run_file_leaves_unused_are_named(engine, rl_run):
    assert "1 of 2 devices used: [runtime]" in engine("plan", "rl.toml", "--devices", "h200x2").out
    assert "devices used" not in engine("plan", "rl.toml", "--devices", "h200").out


def test_pools_of_more_devices_than_exist_do_not_fit(engine, rl_run):
    pools = ("--set", "runtime.backend=torchrun", "--set", "placement.pools={train=2, serve=2}")
    roles = (
        "--set",
        "placement.actor=train",
        "--set",
        "placement.rollout=serve",
        "--set",
        "actor.backend=fsdp",
    )
    answer = engine("plan", "rl.toml", "--devices", "h200x3", *pools, *roles)
    assert answer.code == 2, answer.err
    assert "too few devices: the run uses 4, --devices names 3." in answer.out
    assert engine("plan", "rl.toml", "--devices", "h200x4", *pools, *roles).code == 0


def test_the_example_of_two_machines_fits_into_them_and_not_into_one(
    engine, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    example = Path(__file__).parents[4] / "examples/cluster/qwen3_32b.toml"
    (tmp_path / "run.toml").write_text(example.read_text())
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 128)
    small = (
        "--shape",
        "qwen3-32b",
        "--set",
        f"model.tokenizer={tiny_model}",
        "--set",
        "data.chat_template=false",
    )
    answer = engine("plan", "run.toml", *small, "--devices", "h100x16", "--json")
    assert answer.code == 0, answer.err
    (found,) = json.loads(answer.out)["pools"]
    assert found["fits"]
    assert found["devices"] == 16
    assert engine("plan", "run.toml", *small, "--devices", "h100x8").code == 2


def test_what_does_not_fit_names_the_phase_and_ends_with_2(engine, sft_run):
    answer = engine("plan", "run.toml", "--memory", "0.3")
    assert answer.code == 2
    assert (
        "The memory of the device (0.30 GiB) does not suffice, by estimate: phase 'train' needs" in answer.out
    )


@pytest.fixture
def learned(engine, rl_run, tmp_path, monkeypatch):
    """A run of GRPO with the sampler hf, of four steps, whose responses end at 6 tokens or before."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    sets = ["--set", "rollout.backend=hf", "--set", "rollout.max_response_tokens=6", "--set", "run.steps=4"]
    assert engine("train", "rl.toml", *sets).code == 0
    return sets


def lines_of(tmp_path, name="first"):
    return [
        json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_calibrated_plan_has_the_seconds_of_the_run(engine, learned, tmp_path):
    words = ("plan", "rl.toml", "--devices", "cpu", *learned)
    refused = engine("plan", "rl.toml", "--memory", "24", *learned, "--calibrate", "first")
    assert refused.code == 2
    assert "--calibrate first: nothing can be compared" in refused.err
    assert not (tmp_path / "settings").exists()
    answer = engine(*words, "--calibrate", "first")
    assert answer.code == 0, answer.err
    assert "calibrated: generate.hf " in answer.out
    assert f"kept in {tmp_path / 'settings/engine/plan.json'}" in answer.out
    lines = lines_of(tmp_path)[1:]
    mean = statistics.median(line["response_length/mean"] for line in lines)
    after = json.loads(engine(*words, "--response", str(mean), "--json").out)["seconds"]
    for phase in ("generate", "train"):
        measured = statistics.median(line[f"time/{phase}"] for line in lines)
        assert after["phases"][phase]["seconds"] == pytest.approx(measured, rel=0.25)
        assert "calibrated: " in after["phases"][phase]["says"]
    assert after["phases"]["reward"]["seconds"] is None
    assert after["step"] == pytest.approx(sum(p["seconds"] or 0 for p in after["phases"].values()))
    assert after["run"] == pytest.approx(4 * after["step"])


@pytest.mark.slow
def test_a_calibration_takes_the_number_of_devices_from_the_run(engine, learned, tmp_path, monkeypatch):
    counts, file = [], tmp_path / "runs/first/timeline.jsonl"
    monkeypatch.setattr(
        calibration,
        "ratios_of",
        lambda trainer, device, lines: counts.append(device.count) or {"train.torch": 1.0},
    )
    words = ("plan", "rl.toml", "--devices", "cpu", *learned, "--calibrate", "first")
    assert engine(*words).code == 0
    with file.open("a") as lines:
        lines.write('\n["actor", "rank 1", "save", 1.0, 2.0]')
    assert engine(*words).code == 0
    assert counts == [1, 2]
    file.unlink()
    refused = engine(*words)
    assert refused.code == 4
    assert "timeline.jsonl has no span" in refused.err


@pytest.mark.slow
def test_a_run_on_a_calibrated_device_logs_plan_and_measurement_at_its_end(engine, learned, tmp_path):
    log = tmp_path / "runs/first/logs/attempt_0/run.log"
    assert "Planned and measured" not in log.read_text()  # a CPU has no data sheet
    assert engine("plan", "rl.toml", "--devices", "cpu", *learned, "--calibrate", "first").code == 0
    assert engine("train", "rl.toml", *learned, "--set", "run.name=second").code == 0
    said = (tmp_path / "runs/second/logs/attempt_0/run.log").read_text()
    assert "Planned and measured seconds of a step, medians of 3: generate " in said
    assert "keeps the ratios" in said


def test_the_disk_of_a_day_follows_from_the_seconds_of_a_step(engine, sft_run):
    found = json.loads(engine("plan", "run.toml", "--devices", "h200", "--json").out)
    disk, step = found["disk"], found["seconds"]["step"]
    assert disk["bytes_a_day"] == pytest.approx(86400 / step * disk["checkpoint_bytes"])  # each step saves
    rare = ["--set", "checkpoint.every_steps=0", "--set", "checkpoint.every_minutes=30"]
    disk = json.loads(engine("plan", "run.toml", "--devices", "h200", "--json", *rare).out)["disk"]
    assert disk["bytes_a_day"] == 48 * disk["checkpoint_bytes"]
    never = ["--set", "checkpoint.every_steps=0"]
    disk = json.loads(engine("plan", "run.toml", "--devices", "h200", "--json", *never).out)["disk"]
    assert disk["bytes_a_day"] is None


def test_seconds_of_a_device_without_a_name_are_unknown(engine, sft_run):
    answer = engine("plan", "run.toml", "--memory", "24")
    assert "seconds of a step: unknown, because the device has no known rates" in answer.out


def test_a_plan_on_a_cpu_has_seconds_alone(engine, rl_run):
    answer = engine("plan", "rl.toml", "--devices", "cpu", "--set", "rollout.backend=hf")
    assert answer.code == 0, answer.err
    assert "GiB  " not in answer.out.partition("disk:")[0]
    assert "reward    unknown" in answer.out
    assert "time: 0:00:0" in answer.out


def test_a_shape_is_planned_with_the_tokenizer_of_the_run_file(engine, sft_run):
    answer = engine("plan", "run.toml", "--devices", "h200", "--shape", "qwen3-8b", "--json")
    weights = json.loads(answer.out)["pools"][0]["roles"]["actor"]["kept"]["weights"]
    assert weights == pytest.approx(4 * 8.19e9, rel=0.01)
