"""The rows that a distillation run takes: prompts to sample from and examples of the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_core import load_config
from engine_core.config.assemble import plugins_for

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
        trainer.push_weights = lambda updated: {}  # there is no sampler
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
    trainer = opened({"plugins": ["down.py"], "data.curriculum": "down", "data.shuffle": False})
    assert taken(trainer, "sdsd") == [11, 10, 0, 1, 9, 8, 2, 3]
