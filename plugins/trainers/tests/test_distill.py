"""The rows that a distillation run takes: prompts to sample from and examples of the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine_core import load_config
from engine_core.config.assemble import plugins_for
from engine_core.errors import DataError, TrainingFailed

ROWS = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(12)]


@pytest.fixture
def opened(tiny_model, tmp_path):
    """``opened(changes, rows)``: a trainer whose inputs are loaded, without models; all are closed at the end."""
    trainers = []

    def make(changes=None, rows=ROWS):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {
            "trainer": "distill",
            "model.path": str(tiny_model),
            "teacher.path": str(tiny_model),
            "data.train": str(tmp_path / "rows.jsonl"),
            "data.prompts_per_step": 2,
            "distill.data_share": 0.5,
            "run.steps": 6,
            **(changes or {}),
        }
        config = load_config(overrides=settings)
        trainer = plugins_for(config).resolve("trainers", "distill")(config)
        trainers.append(trainer)
        trainer.training = True
        trainer.load_inputs()
        return trainer

    yield make
    for trainer in trainers:
        trainer.close()


def taken(trainer, steps):
    """The rows of these steps in order: "d" takes from the data, "s" prompts to sample from."""
    items = [trainer.take_examples() if step == "d" else trainer.take_prompts(2) for step in steps]
    return [int(item.id.partition(":")[2]) for each in items for item in each]


def saved(trainer):
    """The state of the data and of the trainer, as a checkpoint holds it."""
    return json.loads(json.dumps([trainer.source.state(), trainer.state()]))


def resumed(trainer, state):
    trainer.push_weights = lambda updated: {}  # there is no sampler
    trainer.source.load_state(state[0])
    trainer.load_state(state[1], Path())
    return trainer


@pytest.mark.parametrize(("steps", "workers"), [("dsdsds", 0), ("ssdddd", 0), ("ddssds", 1)])
def test_steps_from_the_data_and_sampled_ones_use_each_row_once_an_epoch(opened, steps, workers):
    trainer = opened({"data.num_workers": workers})
    assert sorted(taken(trainer, steps)) == list(range(12))
    assert trainer.source.counters["data/epoch"] == 1.0
    assert sorted(taken(trainer, steps)) == list(range(12))
    assert trainer.source.counters["data/epoch"] == 2.0


def test_the_rows_come_in_the_order_of_a_run_that_only_samples(opened):
    assert taken(opened(), "sdddsdsds") == taken(opened(), "sssssssss")


@pytest.mark.parametrize("done", [0, 1, 3, 4])
def test_a_resumed_run_takes_the_rows_of_the_uninterrupted_one(opened, done):
    steps, straight, first = "dssdsdd", opened(), opened()
    before = taken(first, steps[:done])
    after = resumed(opened(), saved(first))
    assert before + taken(after, steps[done:]) == taken(straight, steps)
    assert saved(after) == saved(straight)


@pytest.mark.parametrize(("prompts", "examples"), [("ss", "d"), ("s", "dd")])
def test_a_checkpoint_of_two_positions_is_continued_after_the_later_one(opened, prompts, examples):
    sampled, learned = opened(), opened()
    taken(sampled, prompts)
    taken(learned, examples)
    state = saved(sampled)
    state[1]["examples"] = learned.examples.state()
    order = taken(opened(), "ssssss")
    assert taken(resumed(opened(), state), "dsds") == order[4:]
    assert taken(resumed(opened(), state), "sdsd") == order[4:]


LONG = {"prompt": "1+1=", "response": "2" * 20}  # too long for an example
UNUSABLE = {"prompt": "", "response": "2"}  # no prompt
LIMITS = {"distill.max_tokens": 16, "data.over_long": "skip", "data.max_bad_rows": 2, "data.shuffle": False}


def skipped(trainer):
    return {name: trainer.source.counters[f"data/{name}"] for name in ("over_long", "bad_rows")}


def test_rows_that_steps_of_either_kind_skip_are_counted_together(opened):
    rows = [LONG, UNUSABLE, *ROWS[:4], UNUSABLE, LONG, *ROWS[4:7]]
    trainer = opened(LIMITS, rows)
    assert taken(trainer, "d") == [1, 2]  # without a prompt, an example is usable
    assert skipped(trainer) == {"over_long": 1.0, "bad_rows": 0.0}
    assert taken(trainer, "ss") == [3, 4, 5, 7]
    assert skipped(trainer) == {"over_long": 1.0, "bad_rows": 1.0}
    again = resumed(opened(LIMITS, rows), saved(trainer))
    assert taken(again, "dd") == [8, 9, 10, 1]
    assert skipped(again) == {"over_long": 2.0, "bad_rows": 1.0}


def test_a_limit_of_unusable_rows_counts_those_of_both_kinds(opened):
    no_response, rows = {"prompt": "1+1=", "response": ""}, ROWS[:2]
    trainer = opened(LIMITS, [no_response, *rows, UNUSABLE, *rows, UNUSABLE, *rows])
    assert taken(trainer, "ds") == [1, 2, 4, 5]
    with pytest.raises(DataError, match=r"Unusable rows so far: 3; \[data\] max_bad_rows is 2"):
        trainer.take_prompts(2)


def test_an_example_that_is_too_long_names_the_key_of_distillation(opened):
    trainer = opened(LIMITS | {"data.over_long": "error"}, [LONG, *ROWS])
    with pytest.raises(DataError, match=r"\[distill\] max_tokens is 16\. Raise it, or set over_long"):
        trainer.take_examples()


DOWN = """
from engine_core import hookimpl
from engine_core.specs import Curriculum


@hookimpl
def engine_curricula():
    return {"down": Curriculum(load=lambda rows, round: range(len(rows) - 1, -1, -1))}
"""


def test_a_curriculum_orders_prompts_alone(opened, tmp_path, monkeypatch):
    (tmp_path / "down.py").write_text(DOWN)
    monkeypatch.chdir(tmp_path)
    trainer = opened(LIMITS | {"plugins": ["down.py"], "data.curriculum": "down"}, [LONG, *ROWS])
    assert taken(trainer, "sdsd") == [12, 11, 1, 2, 10, 9, 3, 4]
    assert skipped(trainer) == {"over_long": 1.0, "bad_rows": 0.0}


REPLAY = {
    "distill.data_share": 0.0,
    "stage": [{"name": "replay_cache"}],
    "rollout.max_response_tokens": 6,
    "rollout.max_log_prob_gap": 1e-3,
    "actor.optim.lr": 0.05,
    "run.steps": 3,
    "tracking.trackers": [],
}


def test_replayed_tokens_may_differ_from_the_student_and_new_ones_may_not(opened, tmp_path):
    trainer = opened(REPLAY | {"run.dir": str(tmp_path / "runs")})
    trainer.setup(training=True)
    with torch.no_grad():  # else the student is its teacher
        for weight in trainer.runtime.engines["actor"].module.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    metrics = trainer.train()
    assert metrics["stage/replay_cache/share"] == 0.5
    assert metrics["mismatch/mean_abs"] > 1e-3 > metrics["mismatch/fresh_mean_abs"]
    with pytest.raises(TrainingFailed, match=r"max_log_prob_gap"):
        trainer.check({"mismatch/mean_abs": 2.0, "mismatch/fresh_share": 0.5, "mismatch/fresh_abs": 0.1})
    trainer.check({"actor/divergence": 1.0})  # of a step from the data
