"""Rollouts that are drawn again by their rewards."""

from collections import Counter

import pytest
import torch

from engine_core.types import Prompt, Rollout
from engine_plugin_trainers.algorithms.resampling import pf_ppo_resample


def rollout(reward, group=0, valid=True):
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
        valid=valid,
    )


def test_nothing_stays_nothing():
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
