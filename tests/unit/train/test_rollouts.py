"""Metrics of several rounds; the rounds themselves are in tests/integration/test_algorithms.py."""

import statistics

import pytest

from engine_core.metrics import Sum
from engine_core.train.rollouts import combined


def test_one_round_is_as_it_is():
    noted = {"reward/mean": 0.1, "reward/failures": 3.0}
    assert combined([(7, noted)]) == noted


def test_rounds_together_are_as_if_scored_at_once():
    rounds = [[1.0, 0.0, 0.5], [2.0], [0.0, 0.0, 1.0, 1.0]]
    scored = [
        (len(values), {"reward/mean": statistics.fmean(values), "reward/std": statistics.pstdev(values)})
        for values in rounds
    ]
    everything = [value for values in rounds for value in values]
    found = combined(scored)
    assert found["reward/mean"] == pytest.approx(statistics.fmean(everything))
    assert found["reward/std"] == pytest.approx(statistics.pstdev(everything))


def test_counts_are_summed():
    found = combined([(4, {"some/count": Sum(1.0)}), (8, {"some/count": Sum(2.0)})])
    assert found == {"some/count": 3.0}


def test_a_reward_named_like_a_count_is_a_mean():
    assert combined([(1, {"reward/errors": 1.0}), (3, {"reward/errors": 0.0})]) == {"reward/errors": 0.25}


def test_a_reward_that_applied_in_one_round_has_the_mean_of_that_round():
    found = combined([(4, {"reward/mean": 1.0, "reward/style": 0.5}), (4, {"reward/mean": 0.0})])
    assert found == {"reward/mean": 0.5, "reward/style": 0.5}
