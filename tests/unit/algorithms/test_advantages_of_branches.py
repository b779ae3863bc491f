"""Branches of episodes in the advantages: each episode counts once, and its branches get its value."""

import pytest
import torch

from engine_core.algorithms.advantages import advantages_of, dr_grpo, grpo, rloo
from engine_core.types import BRANCH, Batch

REWARDS = [1.0, 0.0, 3.0]  # of three episodes of a group
ROWS = [0, 0, 0, 1, 2, 2]  # the episode of each sequence: the first has two branches, the last one has one
MASKS = [[0, 1, 1], [0, 0, 1], [1, 0, 0], [0, 1], [0, 1, 0, 1], [1, 1]]


def batch_of(rows, masks, **columns):
    rewards = torch.tensor([REWARDS[row] for row in rows])
    sequences = {"rewards": rewards, "group_ids": torch.zeros(len(rows), dtype=torch.int64)}
    sequences |= {"valid": torch.ones(len(rows), dtype=torch.bool), **columns}
    mask = torch.tensor([bool(value) for each in masks for value in each])
    lengths = torch.tensor([len(each) for each in masks])
    return Batch(torch.zeros(len(mask), dtype=torch.int64), lengths, {"loss_mask": mask}, sequences)


@pytest.fixture
def branched():
    is_branch = [row in ROWS[:i] for i, row in enumerate(ROWS)]
    return batch_of(ROWS, MASKS, **{BRANCH: torch.tensor(is_branch)})


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
def test_branches_get_the_value_of_their_episode_and_change_no_statistic(branched, estimator):
    alone = batch_of([0, 1, 2], [[1], [1], [1]])
    values = estimator(alone)
    found = advantages_of(estimator, branched, {})
    expected = [values[row] * value for row, mask in zip(ROWS, MASKS, strict=True) for value in mask]
    assert found.tolist() == pytest.approx([float(value) for value in expected])
    assert not torch.equal(found, estimator(branched))  # what a batch without the column would get


def test_an_estimator_gets_its_options(branched):
    found = advantages_of(grpo, branched, {"normalize_by_std": False})
    assert torch.equal(found, advantages_of(dr_grpo, branched, {}))


def test_an_estimator_of_tokens_sees_all_sequences(branched):
    seen = []

    def positions(batch):
        seen.append(len(batch))
        return torch.arange(batch.num_tokens, dtype=torch.float32) * batch["loss_mask"]

    assert torch.equal(advantages_of(positions, branched, {}), positions(branched))

    def with_returns(batch):
        made = positions(batch)
        return {"advantages": made, "returns": made}

    assert torch.equal(advantages_of(with_returns, branched, {})["returns"], positions(branched))
    assert 6 in seen


def test_an_episode_without_loss_tokens_of_its_own_gives_its_branches_nothing(branched):
    branched.tokens["loss_mask"][:3] = False
    found = advantages_of(grpo, branched, {})
    assert not found[:9].any()
    assert found[9:].any()
