"""engine bench, on a tiny model."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core.errors import ConfigError
from engine_plugin_tools.bench import parts
from engine_plugin_tools.bench.shapes import DENSE_BF16_FLOPS


def measured(engine, *words):
    answer = engine("bench", *words, "--json")
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


def test_train_counts_every_token_of_the_mini_batch_and_plans_as_a_run_does(engine, sft_run):
    found = measured(
        engine, "train", "run.toml", "--shape", "tiny", "--sequences", "6", "--length", "20", "--prompt", "5",
        "--steps", "2", "--warmup", "1", "--set", "actor.max_tokens_per_rank=40",
    )  # fmt: skip
    assert (found["tokens_per_step"], found["micro_batches"]) == (120, 3)
    assert found["tokens_per_s"] == pytest.approx(120 / found["step_s"])
    assert (found["backend"], found["model"], found["device"]) == ("torch", "tiny", "cpu")
    assert "mfu" not in found  # the peak of this device is unknown


def test_train_gives_the_memory_plan_the_lengths_of_its_sequences(engine, sft_run, monkeypatch):
    asked = []

    def workers(config, roles):
        asked.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(parts, "_workers", workers)
    engine("bench", "train", "run.toml", "--shape", "tiny", "--sequences", "6", "--length", "70000")
    assert [(one.options.max_tokens, one.data.prompts_per_step) for one in asked] == [(70000, 6)]


def test_rollout_samples_full_groups_of_full_length(engine, rl_run):
    found = measured(
        engine, "rollout", "rl.toml", "--prompts", "3", "--prompt", "4", "--response", "5", "--steps", "1"
    )
    assert found["group_size"] == 3
    assert 0 < found["generated_tokens"] <= 3 * 3 * 5


def test_sync_says_what_was_moved(engine, rl_run, tiny_model):
    found = measured(engine, "sync", "rl.toml", "--steps", "2")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model))
    assert found["bytes"] == 4 * sum(p.numel() for p in model.parameters())  # float32, tied weights once
    assert found["step_s"] < 60


def test_step_shows_the_phases_and_leaves_nothing(engine, rl_run):
    before = sorted(path.name for path in rl_run.parent.iterdir())
    found = measured(engine, "step", "rl.toml", "--steps", "1", "--warmup", "1")
    assert {"time/step", "time/generate", "time/train"} <= found.keys()
    assert sorted(path.name for path in rl_run.parent.iterdir()) == before


SPY = """
import pathlib
from engine_core import hookimpl
from engine_core.specs import TrackerSpec
from engine_core.runs.tracking import Tracker

class Spy(Tracker):
    def log(self, step, metrics): pathlib.Path("spied").write_text("heard of it")

@hookimpl
def engine_trackers():
    return {"spy": TrackerSpec(load=Spy)}
"""


def test_steps_save_nothing_and_tell_no_tracker(engine, rl_run):
    (rl_run.parent / "spy.py").write_text(SPY)
    rl_run.write_text(rl_run.read_text().replace('["dice.py"]', '["dice.py", "spy.py"]'))
    told = ["--set", 'tracking.trackers=["spy"]', "--set", "checkpoint.best_metric=reward/mean"]
    answer = engine("bench", "step", "rl.toml", "--steps", "1", "--warmup", "1", *told)
    assert answer.code == 0, answer.err
    assert "Checkpoint:" not in answer.err
    assert not (rl_run.parent / "spied").exists()


def test_the_table_is_for_people(engine, sft_run):
    answer = engine(
        "bench", "train", "run.toml", "--sequences", "2", "--length", "8", "--prompt", "2", "--steps", "1"
    )
    assert answer.code == 0
    assert "tokens_per_s" in answer.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "run.toml", "--length", "8", "--prompt", "8"], "--prompt 8 leaves nothing of --length 8"),
        (["train", "run.toml", "--shape", "tiney"], "Did you mean 'tiny'"),
        (["rollouts", "run.toml"], "Unknown command 'bench.rollouts'. Did you mean 'bench.rollout'"),
    ],
)
def test_bad_words_are_refused(engine, sft_run, words, message):
    answer = engine("bench", *words)
    assert answer.code == 2
    assert message in answer.err


def test_train_says_how_much_of_a_known_device_it_uses(engine, sft_run, monkeypatch):
    monkeypatch.setitem(DENSE_BF16_FLOPS, "cpu", 1e12)
    found = measured(
        engine, "train", "run.toml", "--shape", "tiny", "--sequences", "4", "--length", "16", "--prompt", "6",
        "--steps", "2", "--warmup", "0",
    )  # fmt: skip
    body = 4 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 192)  # weights of four layers
    head, seen = (
        512 * 64,
        4 * 4 * 16 * 4 * 16 * 16,
    )  # vocabulary x hidden; layers x heads x size x n^2 x sequences
    operations = 6 * (body * 64 + head * 40 + seen)
    assert found["mfu"] == pytest.approx(operations / 1e12 / found["step_s"])
    assert found["forward_backward_s"] + found["optimizer_s"] == pytest.approx(found["step_s"])
