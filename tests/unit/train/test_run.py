"""Inputs that a trainer refuses before any model is built; trainings are in tests/integration."""

import json
from contextlib import closing

import pytest

from engine_core import load_config
from engine_core.cli.loading import load_trainer
from engine_core.errors import DataError
from engine_core.train.checkpointing import Resume

LONG = {"prompt": "1+1=", "response": "2" * 40}
HELD_OUT = [
    ("sft", [{"prompt": "1+1=", "response": "2"}, {"prompt": "1+1=", "response": ""}], "rows.jsonl:2"),
    ("sft", [LONG], "None of the 1 rows is usable"),
    ("dpo", [{"prompt": "1+1=", "chosen": "2", "rejected": "2"}], "rows.jsonl:1"),
    ("dpo", [{"prompt": "1+1=", "chosen": "2" * 40, "rejected": "3"}], "None of the 1 rows is usable"),
]
"""Trainer, held-out rows, what is said of them."""


@pytest.mark.parametrize(("name", "rows", "told"), HELD_OUT)
def test_held_out_rows_that_cannot_be_used_are_refused_before_a_model_is_built(
    sft_run, tmp_path, name, rows, told
):
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}) + "\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"trainer": name, "data.train": str(tmp_path / "train.jsonl"), f"{name}.max_tokens": 16}
    with closing(load_trainer(load_config(sft_run, overrides=settings | {"eval.at_end": True}))) as trainer:
        with pytest.raises(DataError, match=told):
            trainer.load_inputs()
        assert trainer.groups == {}


def test_held_out_rows_are_not_read_where_nothing_is_evaluated(sft_run, tmp_path):
    train = tmp_path / "rows.jsonl"
    train.rename(tmp_path / "train.jsonl")
    train.write_text(json.dumps({"prompt": "1+1=", "response": ""}) + "\n")
    load_trainer(load_config(sft_run, overrides={"data.train": str(tmp_path / "train.jsonl")})).load_inputs()


def test_learning_rates_are_planned_for_the_updates_that_the_schedule_gives(rl_run):
    settings = {"run.steps": 4, "schedule": {"algorithm.epochs": [[4, 3]]}}
    with closing(load_trainer(load_config(rl_run, overrides=settings, allow_code=True))) as trainer:
        trainer.load_inputs()
        assert trainer.optimizer_steps(trainer.total_steps) == 1 + 1 + 1 + 3
        assert "3 optimizer step(s) each, 6 in all," in trainer.derived()


def test_a_pass_over_the_data_ends_with_its_last_row_if_the_batch_changed(sft_run, tmp_path, engine):
    assert engine("train", "run.toml").code == 0  # two steps: 8 of 16 rows
    for rows, steps in (4, 4), (8, 3), (2, 6), (16, 2):
        settings = {"run.steps": None, "run.epochs": 1, "data.prompts_per_step": rows}
        with closing(load_trainer(load_config(sft_run, overrides=settings))) as trainer:
            trainer.setup(training=True, resume=Resume.find(tmp_path / "runs/first"))
            assert trainer.total_steps == steps
