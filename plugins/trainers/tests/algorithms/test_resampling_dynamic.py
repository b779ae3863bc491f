import pytest
import torch

from engine_core.errors import ConfigError
from engine_core.types import Prompt, Rollout
from engine_plugin_trainers.algorithms.resampling import dynamic_sampling


def rollout(reward, group=0, valid=True, **rewards):
    return Rollout(
        request_id=f"{group}",
        prompt=Prompt("p", [1], ""),
        token_ids=torch.tensor([1, 2]),
        loss_mask=torch.tensor([False, True]),
        rollout_log_probs=torch.zeros(2),
        policy_versions=torch.zeros(2, dtype=torch.int32),
        finish_reason="stop",
        group_id=group,
        reward=reward,
        rewards=rewards,
        valid=valid,
    )


def test_groups_without_a_difference_are_dropped_whole():
    made = [rollout(1.0, 0), rollout(0.0, 1), rollout(1.0, 0), rollout(0.5, 1), rollout(7.0, 2)]
    kept, noted = dynamic_sampling(made, 1)
    assert kept == [made[1], made[3]]
    assert noted == {"groups": 3.0, "dropped_groups": 2.0}


def test_an_invalid_rollout_is_no_difference_and_stays_with_its_group():
    flat = [rollout(1.0, 0), rollout(1.0, 0), rollout(0.0, 0, valid=False)]
    assert dynamic_sampling(flat, 1)[0] == []
    mixed = [rollout(1.0, 0), rollout(0.5, 0), rollout(0.0, 0, valid=False)]
    assert dynamic_sampling(mixed, 1)[0] == mixed


def test_one_reward_can_decide_alone():
    made = [rollout(1.0, 0, right=1.0, short=0.0), rollout(0.5, 0, right=1.0, short=-0.5)]
    made += [rollout(1.0, 1, right=1.0, short=0.0), rollout(0.5, 1, right=0.0, short=0.5)]
    assert dynamic_sampling(made, 1, reward="right")[0] == made[2:]
    not_applied = [rollout(1.0, 0, right=None), rollout(0.5, 0, right=1.0)]
    assert dynamic_sampling(not_applied, 1, reward="right")[0] == []


def test_a_reward_that_nobody_gives_is_named():
    with pytest.raises(ConfigError, match=r"stage.dynamic_sampling.*'rihgt'.*Did you mean 'right'"):
        dynamic_sampling([rollout(1.0, right=1.0)], 1, reward="rihgt")


def test_nothing_stays_nothing():
    assert dynamic_sampling([], 1) == ([], {"groups": 0.0, "dropped_groups": 0.0})
