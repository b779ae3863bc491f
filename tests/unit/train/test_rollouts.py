"""Metrics of several rounds, and greedy responses; the rounds themselves are in tests/integration/test_algorithms.py."""

import dataclasses
import statistics
from types import SimpleNamespace

import pytest
import torch

from engine_core.config import EngineConfig
from engine_core.metrics import Sum
from engine_core.rewards.runner import reward_statistics
from engine_core.specs import RefillOptions
from engine_core.train.rollouts import Rounds, Sampler, combined
from engine_core.train.settings import Settings
from engine_core.types import TIMEOUT, Prompt, Rollout


def test_one_round_is_as_it_is():
    noted = {"reward/mean": 0.1, "reward/failures": 3.0}
    assert combined([(7, noted)]) == noted


def rollout(reward, valid=True, group=0):
    return Rollout(
        "0:0:0",
        Prompt("p", [5], ""),
        torch.tensor([5, 6]),
        torch.tensor([False, True]),
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int32),
        "stop",
        reward=reward,
        valid=valid,
        group_id=group,
    )


def test_rewards_of_rounds_together_are_those_of_their_valid_rollouts():
    stages = SimpleNamespace(run=lambda configs, rollouts, step: (rollouts, {}))
    rounds = Rounds(EngineConfig(), stages, step=1)
    first = [rollout(1.0), *(rollout(9.0, valid=False) for _ in range(5))]
    second = [rollout(reward, group=1) for reward in (0.0, 0.0, 1.0)]
    for sampled in (first, second):
        rounds.add(sampled, reward_statistics(sampled))
    _, metrics = rounds.finish({})
    assert metrics["reward/mean"] == pytest.approx(2 / 4)
    assert metrics["reward/std"] == pytest.approx(statistics.pstdev([1.0, 0.0, 0.0, 1.0]))
    assert metrics["reward/zero_variance_groups"] == 0.5


@pytest.mark.parametrize(
    ("policy", "failure", "valid"), [("keep", "", True), ("drop", TIMEOUT, False), ("zero", TIMEOUT, True)]
)
def test_a_greedy_response_that_timed_out_follows_the_policy_of_the_others(policy, failure, valid):
    config = EngineConfig.model_validate({"rollout": {"on_timeout": policy, "request_timeout_seconds": 1.0}})
    sampler = Sampler(Settings(config), {})
    sampler.stream = lambda requests: ([late] for late in late_to(requests))
    (found,) = sampler.sample_greedy([Prompt("p", [5], "")], step=1)
    assert (found.failure, found.valid) == (failure, valid)


def late_to(requests):
    return [dataclasses.replace(rollout(0.0), request_id=each.id, failure=TIMEOUT) for each in requests]


def test_counts_are_summed():
    found = combined([(4, {"some/count": Sum(1.0)}), (8, {"some/count": Sum(2.0)})])
    assert found == {"some/count": 3.0}


def test_a_reward_named_like_a_count_is_a_mean():
    assert combined([(1, {"reward/errors": 1.0}), (3, {"reward/errors": 0.0})]) == {"reward/errors": 0.25}


def test_a_reward_that_applied_in_one_round_has_the_mean_of_that_round():
    found = combined([(4, {"reward/mean": 1.0, "reward/style": 0.5}), (4, {"reward/mean": 0.0})])
    assert found == {"reward/mean": 0.5, "reward/style": 0.5}


def test_a_stage_that_runs_in_each_round_has_the_mean_of_its_shares_and_the_sum_of_its_counts():
    noted = iter([{"share": 0.5, "dropped": Sum(2)}, {"share": 1.0, "dropped": Sum(1)}])
    stages = SimpleNamespace(run=lambda configs, rollouts, step: (rollouts, next(noted) if configs else {}))
    config = EngineConfig(data={"prompts_per_step": 2}, stage=[{"name": "refill"}])
    config.stage[0].options = RefillOptions(max_rounds=2)
    rounds = Rounds(config, stages, step=1)
    for group in range(2):
        rounds.add([rollout(1.0, group=group)], {})
    _, metrics = rounds.finish({})
    assert (metrics["share"], metrics["dropped"], metrics["stage/refill/rounds"]) == (0.75, 3, 2)
