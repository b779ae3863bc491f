"""Policies and columns of rewards that run in worker processes."""

import time

import pytest

from engine_core.errors import DataError, TrainingFailed


def test_a_time_out_has_a_policy_of_its_own(runner, rollouts):
    one = runner("misbehave", on_timeout="fail", timeout_seconds=0.5)
    with pytest.raises(
        TrainingFailed, match=r'no answer after 0\.5 s\. The run ends because on_timeout = "fail"'
    ):
        one.score(rollouts("a", "sleep", "b"), 4)


def test_workers_of_all_rewards_work_at_once(runner, rollouts):
    one = runner("late", "misbehave", timeout_seconds=3.0, max_failure_share=1.0)
    began = time.monotonic()
    metrics = one.score(rollouts("sleep"), 1)
    assert metrics["reward/timeouts"] == 2
    assert time.monotonic() - began < 5.9  # one after the other would be 6


def test_no_rollouts_give_finite_metrics(runner):
    metrics = runner("exact", "letters").score([], 1)
    assert metrics["reward/mean"] == metrics["reward/zero_variance_groups"] == 0.0


def test_a_missing_column_is_told_before_anything_is_scored(runner, rollouts):
    with pytest.raises(DataError, match="Reward 'exact' needs 'answer', which is no column of the data"):
        runner("exact").score(rollouts("a"), 1)


def test_a_column_that_a_reward_needs_is_asked_for_before_the_first_step(runner):
    one = runner("exact")
    one.check_columns(["question", "answer"])
    with pytest.raises(
        DataError, match=r"'exact' needs 'answer', which is no column of the data\. Did you mean 'answers'"
    ):
        one.check_columns(["answers"])
