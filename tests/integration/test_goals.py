"""Metrics with goals and bounds: `run.finish_above`, `run.finish_below`, `run.fail_above`."""

import json

import pytest

from engine_core import Trainer, load_config
from engine_core.errors import ConfigError, TrainingFailed


def digits(completions):
    """Share of characters that are digits: a reward with a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def trainer(grpo, changes):
    return Trainer(load_config(overrides={**grpo, **changes}), rewards=[digits])


def metrics_of(run):
    return [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]


def test_a_metric_over_its_bound_ends_the_run_without_saving_the_step(grpo):
    run = trainer(grpo, {"run.fail_above": {"actor/grad_norm": 1e-9}, "checkpoint.every_steps": 1})
    with pytest.raises(
        TrainingFailed, match=r"actor/grad_norm is .* after step 1, above run.fail_above = 1e-09"
    ):
        run.train()
    assert list(run.folder.checkpoints.glob("step_*")) == []
    assert len(metrics_of(run)) == 1


@pytest.mark.parametrize(
    ("key", "goals", "every"),
    [
        ("finish_above", {"actor/grad_norm": 1e-9}, 5),
        ("finish_below", {"reward/mean": 1e9}, 5),
        ("finish_above", {"reward/mean": 1e9, "eval/reward_mean": -1.0}, 1),
    ],
)
def test_the_first_step_at_its_goal_is_the_last_one_and_is_evaluated_and_saved(grpo, key, goals, every):
    run = trainer(grpo, {f"run.{key}": goals, "run.steps": 3, "eval.every_steps": every, "eval.at_end": True})
    run.train()
    (line,) = metrics_of(run)
    assert "eval/reward_mean" in line
    assert [path.name for path in run.folder.checkpoints.glob("step_*")] == ["step_00000001"]


def test_a_run_continues_while_no_metric_is_at_its_goal(grpo):
    run = trainer(grpo, {"run.finish_above": {"reward/mean": 1e9}, "run.finish_below": {"actor/lr": -1.0}})
    run.train()
    assert len(metrics_of(run)) == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("run.fail_above", {"actor/grad_nrm": 1.0}), ("checkpoint.best_metric", "actor/grad_nrm")],
)
def test_a_chosen_metric_that_nothing_measures_is_named(grpo, key, value):
    run = trainer(grpo, {key: value})
    with pytest.raises(ConfigError, match=rf"{key}: no step measures .* mean 'actor/grad_norm'"):
        run.train()
