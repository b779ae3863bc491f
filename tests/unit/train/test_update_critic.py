"""How well a critic knows the returns, as one number, and a warm-up that never ends."""

import statistics

import pytest
import torch

from engine_core.config.roles import CriticConfig
from engine_core.errors import ConfigError
from engine_core.train.update import CriticUpdate, explained_variance
from engine_core.types import Batch


def batch_of(values, returns, mask):
    columns = {
        "values": torch.tensor(values),
        "returns": torch.tensor(returns),
        "loss_mask": torch.tensor(mask),
    }
    return Batch(torch.zeros(len(mask), dtype=torch.int64), torch.tensor([len(mask)]), columns)


def test_it_is_one_less_the_share_of_the_variance_that_is_left():
    values, returns = [9.0, 0.5, 1.0, 2.5, 1.0], [7.0, 1.0, 2.0, 3.0, -1.0]
    found = explained_variance(batch_of(values, returns, [False, True, True, True, True]))
    errors = [g - v for g, v in zip(returns[1:], values[1:], strict=True)]
    assert found == pytest.approx(1 - statistics.pvariance(errors) / statistics.pvariance(returns[1:]))


def test_perfect_constant_and_worse_values():
    mask, returns = [True] * 3, [1.0, 2.0, 3.0]
    assert explained_variance(batch_of([1.0, 2.0, 3.0], returns, mask)) == 1
    assert explained_variance(batch_of([5.0, 6.0, 7.0], returns, mask)) == 1  # it is about the spread alone
    assert explained_variance(batch_of([0.0, 0.0, 0.0], returns, mask)) == 0
    assert explained_variance(batch_of([3.0, 2.0, 1.0], returns, mask)) == pytest.approx(-3)


def test_returns_without_a_spread_give_zero():
    assert explained_variance(batch_of([1.0, 2.0], [3.0, 3.0], [True, True])) == 0
    assert explained_variance(batch_of([1.0, 2.0], [3.0, 4.0], [True, False])) == 0
    assert explained_variance(batch_of([1.0, 2.0], [3.0, 4.0], [False, False])) == 0


def test_a_warm_up_of_all_steps_is_refused():
    critic = CriticUpdate(True, CriticConfig(warmup_steps=5), learn=dict)
    critic.check_warmup(6)
    with pytest.raises(
        ConfigError, match=r"critic.warmup_steps: got 5, expected less than the 5 steps of the run"
    ):
        critic.check_warmup(5)
