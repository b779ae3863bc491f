import statistics

import pytest
import torch

from engine_core.algorithms.advantages import group_statistics, grpo
from engine_core.types import Batch


def make_batch(rewards, group_ids, valid=None, lengths=None, prompt=1):
    lengths = lengths or [3] * len(rewards)
    mask = torch.cat([torch.tensor([False] * prompt + [True] * (n - prompt)) for n in lengths])
    return Batch(
        token_ids=torch.arange(sum(lengths)),
        lengths=torch.tensor(lengths),
        tokens={"loss_mask": mask},
        sequences={
            "rewards": torch.tensor(rewards, dtype=torch.float32),
            "group_ids": torch.tensor(group_ids),
            "valid": torch.tensor(valid or [True] * len(rewards)),
        },
    )


def test_grpo_is_the_z_score_within_each_group():
    rewards = [1.0, 0.0, 0.5, 3.0, 1.0]
    batch = make_batch(rewards, [7, 7, 7, 2, 2])
    values = grpo(batch).view(5, 3)
    for members in ([0, 1, 2], [3, 4]):
        group = [rewards[i] for i in members]
        for i in members:
            expected = (rewards[i] - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
            assert values[i].tolist() == pytest.approx([0.0, expected, expected], rel=1e-5)


def test_groups_may_come_in_any_order():
    mixed = grpo(make_batch([1.0, 5.0, 0.0, 6.0], [0, 1, 0, 1])).view(4, 3)[:, 1]
    sorted_ = grpo(make_batch([1.0, 0.0, 5.0, 6.0], [0, 0, 1, 1])).view(4, 3)[:, 1]
    assert torch.equal(mixed, sorted_[[0, 2, 1, 3]])


def test_without_the_deviation_only_the_mean_is_taken_off():
    values = grpo(make_batch([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0]), normalize_by_std=False)
    assert values.view(4, 3)[:, 1].tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_a_group_of_one_has_no_advantage():
    assert grpo(make_batch([5.0], [0])).tolist() == [0.0, 0.0, 0.0]


def test_equal_rewards_have_no_advantage_and_stay_finite():
    assert grpo(make_batch([0.1] * 4, [0] * 4)).abs().max() < 1e-6


def test_an_invalid_rollout_counts_in_no_statistic_and_gets_nothing():
    values = grpo(make_batch([1.0, 0.0, float("nan")], [0, 0, 0], valid=[True, True, False])).view(3, 3)
    root = statistics.stdev([1.0, 0.0])
    assert values[0, 1].item() == pytest.approx(0.5 / (root + 1e-6))
    assert values[2].tolist() == [0.0, 0.0, 0.0]


def test_statistics_of_an_empty_batch_are_empty():
    empty = torch.zeros(0)
    mean, std, count = group_statistics(
        empty, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    )
    assert mean.numel() == std.numel() == count.numel() == 0
