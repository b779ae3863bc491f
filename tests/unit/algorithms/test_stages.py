from collections import Counter

import pytest
import torch

from engine_core.algorithms.stages import dynamic_sampling, pf_ppo_resample
from engine_core.errors import ConfigError
from engine_core.types import Prompt, Rollout


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
    assert pf_ppo_resample([], 1)[0] == []


@pytest.mark.parametrize(
    ("method", "shares"),
    [
        ("pow", [0.0, 1 / 21, 4 / 21, 16 / 21]),
        ("max_min", [0.5, 0, 0, 0.5]),
        ("max_random", [1 / 7] * 3 + [4 / 7]),
    ],
)
def test_rows_are_drawn_in_proportion_to_their_weight(method, shares):
    made = [rollout(reward, i) for i, reward in enumerate((0.0, 1.0, -2.0, 4.0))]
    if method != "pow":
        made = [rollout(reward, i) for i, reward in enumerate((0.0, 1.0, 2.0, 4.0))]
    drawn = Counter()
    for step in range(1000):
        drawn.update(found.group_id for found in pf_ppo_resample(made, step, method=method)[0])
    assert [drawn[i] / 4000 for i in range(4)] == pytest.approx(shares, abs=0.03)


def test_a_drawn_row_is_the_whole_rollout():
    made = [rollout(float(i), group=i) for i in range(5)]
    found, noted = pf_ppo_resample(made, 3)
    assert len(found) == 5
    assert all(any(row is whole for whole in made) for row in found)
    assert noted["distinct"] == len({row.group_id for row in found}) / 5


def test_the_draw_follows_from_seed_and_step():
    made = [rollout(float(i), group=i) for i in range(8)]

    def groups(**arguments):
        return [row.group_id for row in pf_ppo_resample(made, **arguments)[0]]

    assert groups(step=1) == groups(step=1)
    assert len({tuple(groups(step=step, seed=seed)) for step in (1, 2) for seed in (0, 1)}) == 4


def test_an_invalid_rollout_is_never_drawn():
    made = [rollout(100.0, group=9, valid=False), rollout(1.0), rollout(2.0)]
    for step in range(20):
        assert all(row.group_id != 9 for row in pf_ppo_resample(made, step)[0])


def test_without_any_weight_all_stay():
    made = [rollout(0.0), rollout(0.0)]
    assert pf_ppo_resample(made, 1) == (made, {"distinct": 1.0})
