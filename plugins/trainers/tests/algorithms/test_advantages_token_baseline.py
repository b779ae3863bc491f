import math
import random

import pytest
import torch

from engine_core.types import Batch
from engine_plugin_trainers.algorithms.advantages_token_baseline import (
    optimal_token_baseline,
    optimal_token_baseline_multi_turn,
)

BOTH = [optimal_token_baseline, optimal_token_baseline_multi_turn]


def make_batch(masks, rewards, groups, seed=0, valid=None, vocabulary=5, penalty=False):
    """Rollouts with these masks; at each token a random distribution, of which the first word was sampled."""
    rng = random.Random(seed)
    count = sum(map(len, masks))
    logits = torch.tensor(
        [[rng.gauss(0, 1) for _ in range(vocabulary)] for _ in range(count)], dtype=torch.float64
    )
    probabilities = logits.softmax(-1)
    tokens = {
        "loss_mask": torch.tensor([c == "1" for mask in masks for c in mask]),
        "old_log_probs": probabilities[:, 0].log(),
        "sum_pi_squared": probabilities.square().sum(-1),
    }
    if penalty:
        tokens["kl_penalty"] = torch.tensor([rng.gauss(0, 0.3) for _ in range(count)], dtype=torch.float64)
    return Batch(
        token_ids=torch.arange(count),
        lengths=torch.tensor([len(mask) for mask in masks]),
        tokens=tokens,
        sequences={
            "rewards": torch.tensor(rewards, dtype=torch.float64),
            "group_ids": torch.tensor(groups),
            "valid": torch.tensor(valid or [True] * len(masks)),
        },
    )


def expected(batch, multi_turn):
    """The formula by plain loops: position -> rewards to go and summed gradient norms of each member."""
    found, start, rows = [0.0] * batch.num_tokens, 0, {}
    for i, length in enumerate(batch.lengths.tolist()):
        places = [t for t in range(start, start + length) if batch["loss_mask"][t] and batch["valid"][i]]
        start += length
        if not places:
            continue
        earned = [-float(batch["kl_penalty"][t]) if "kl_penalty" in batch else 0.0 for t in places]
        earned[-1] += float(batch["rewards"][i]) - sum(earned)
        row, energy = {}, 0.0
        for k, t in enumerate(places):
            p = math.exp(batch["old_log_probs"][t])
            energy += 1 - 2 * p + float(batch["sum_pi_squared"][t])
            row[k if multi_turn else t - places[0]] = (t, sum(earned[k:]), energy)
        rows.setdefault(int(batch["group_ids"][i]), []).append(row)
    for members in rows.values():
        if len(members) < 2:
            continue
        second = sorted(max(row) for row in members)[-2]
        for row in members:
            for position, (t, to_go, _) in row.items():
                here = [other[position] for other in members if position in other]
                baseline = sum(g * w for _, g, w in here) / sum(w for _, _, w in here)
                found[t] = to_go - (baseline if position <= second else 0.0)
    return found


MASKS = ["0111", "00101100111", "01", "0110011", "01111111", "011", "0111", "0000"]


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", BOTH, ids=lambda f: f.__name__)
def test_it_is_the_weighted_mean_at_each_position(estimator, seed, penalty):
    batch = make_batch(
        MASKS, [1.0, 0.0, 0.5, -1.0, 2.0, 9.0, 7.0, 3.0], [3, 3, 3, 8, 8, 1, 3, 8], seed,
        valid=[True] * 6 + [False, True], penalty=penalty,
    )  # fmt: skip
    multi_turn = estimator is optimal_token_baseline_multi_turn
    assert estimator(batch).tolist() == pytest.approx(expected(batch, multi_turn), abs=1e-6)


def test_the_weight_is_the_squared_norm_of_the_gradient_with_respect_to_the_logits():
    batch = make_batch(["01", "01"], [1.0, 0.0], [0, 0], seed=4)
    energies = []
    for t in (1, 3):
        p = float(batch["old_log_probs"][t].exp())
        rest = float(batch["sum_pi_squared"][t]) - p * p
        energies.append((1 - p) ** 2 + rest)  # d log p(word) / d logits = one_hot - p
    baseline = energies[0] / sum(energies)
    assert optimal_token_baseline(batch)[[1, 3]].tolist() == pytest.approx([1 - baseline, -baseline])


def test_equal_weights_make_it_the_mean():
    batch = make_batch(["011"] * 4, [1.0, 0.0, 0.0, 1.0], [0] * 4)
    batch.tokens["old_log_probs"] = torch.full((12,), math.log(0.5))
    batch.tokens["sum_pi_squared"] = torch.full((12,), 0.5)
    assert optimal_token_baseline(batch)[1::3].tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5])


def test_a_policy_that_is_sure_has_the_plain_mean_and_no_division_by_zero():
    batch = make_batch(["01"] * 2, [1.0, 0.0], [0, 0])
    batch.tokens["old_log_probs"] = torch.zeros(4)
    batch.tokens["sum_pi_squared"] = torch.ones(4)
    assert optimal_token_baseline(batch).tolist() == [0.0, 0.5, 0.0, -0.5]


@pytest.mark.parametrize("estimator", BOTH, ids=lambda f: f.__name__)
def test_equal_rewards_give_nothing_up_to_the_second_longest(estimator):
    batch = make_batch(["011", "0111", "01111"], [2.0] * 3, [0] * 3)
    assert estimator(batch).tolist() == pytest.approx([0.0] * 11 + [2.0], abs=1e-6)


@pytest.mark.parametrize("estimator", BOTH, ids=lambda f: f.__name__)
def test_a_group_of_one_and_an_empty_batch_get_nothing(estimator):
    assert estimator(make_batch(["011"], [3.0], [0])).tolist() == [0.0] * 3
    assert estimator(make_batch(["000"], [3.0], [0])).tolist() == [0.0] * 3
    assert estimator(make_batch(["011"], [3.0], [0]).select([])).tolist() == []


@pytest.mark.parametrize("estimator", BOTH, ids=lambda f: f.__name__)
def test_the_order_of_the_rollouts_does_not_matter(estimator):
    batch = make_batch(MASKS, [float(i) for i in range(8)], [0, 1, 0, 1, 0, 1, 0, 1])
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    mixed = batch.select(order)
    plain = list(estimator(batch).split(batch.lengths.tolist()))
    for values, i in zip(estimator(mixed).split(mixed.lengths.tolist()), order, strict=True):
        assert values.tolist() == pytest.approx(plain[i].tolist(), abs=1e-6)


def test_the_two_agree_without_observations():
    batch = make_batch(["0111", "0011111", "01"], [1.0, 0.0, 2.0], [0, 0, 0])
    assert torch.equal(optimal_token_baseline(batch), optimal_token_baseline_multi_turn(batch))
