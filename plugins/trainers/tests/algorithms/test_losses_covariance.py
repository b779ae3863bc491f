"""Which tokens clip_cov and kl_cov choose: counted by hand."""

import pytest
import torch

from engine_core.types import Batch
from engine_plugin_trainers.algorithms.losses_covariance import covariances, mark_clip_cov, mark_kl_cov

MASK = [0, 1, 1, 1, 0, 1, 1, 1]
ADVANTAGES = [9.0, 1.0, 1.0, 1.0, 9.0, -1.0, -1.0, -1.0]
LOG_PROBS = [0.0, -0.5, -1.0, -3.0, 0.0, -0.2, -2.0, -4.1]


def batch(**tokens):
    return Batch(
        token_ids=torch.zeros(8, dtype=torch.int64),
        lengths=torch.tensor([4, 4]),
        tokens={
            "loss_mask": torch.tensor(MASK, dtype=torch.bool),
            "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
            "current_log_probs": torch.tensor(LOG_PROBS, dtype=torch.float64),
            **tokens,
        },
    )


def by_hand():
    kept = [t for t in range(8) if MASK[t]]
    a_mean = sum(ADVANTAGES[t] for t in kept) / 6
    p_mean = sum(LOG_PROBS[t] for t in kept) / 6
    return [(ADVANTAGES[t] - a_mean) * (LOG_PROBS[t] - p_mean) if MASK[t] else 0.0 for t in range(8)]


def test_the_covariance_is_of_the_loss_tokens_of_the_whole_mini_batch():
    assert covariances(batch()).tolist() == pytest.approx(by_hand())


def test_kl_cov_chooses_the_largest():
    best = sorted(range(8), key=lambda t: by_hand()[t] if MASK[t] else -99)[-2:]
    chosen = mark_kl_cov(batch(), 0, kl_cov_ratio=0.34)["covariance_chosen"]  # int(0.34 * 6) = 2
    assert chosen.nonzero().flatten().tolist() == sorted(best)


def test_at_least_one_token_is_chosen_and_none_of_an_empty_batch():
    assert mark_kl_cov(batch(), 0)["covariance_chosen"].sum() == 1
    empty = batch(loss_mask=torch.zeros(8, dtype=torch.bool))
    assert not mark_kl_cov(empty, 0)["covariance_chosen"].any()
    assert not mark_clip_cov(empty, 0)["covariance_chosen"].any()


def test_clip_cov_chooses_at_random_between_its_bounds_and_the_same_for_the_same_seed():
    inside = {t for t in range(8) if MASK[t] and 0.5 < by_hand()[t] < 2.0}
    assert len(inside) > 1
    options = {"clip_cov_lb": 0.5, "clip_cov_ub": 2.0}
    found = [
        tuple(mark_clip_cov(batch(), seed, **options)["covariance_chosen"].nonzero().flatten().tolist())
        for seed in range(20)
    ]
    assert {t for each in found for t in each} == inside
    assert all(len(each) == 1 for each in found)
    again = mark_clip_cov(batch(), 3, **options)["covariance_chosen"].nonzero().flatten().tolist()
    assert tuple(again) == found[3]


def test_clip_cov_leaves_out_what_the_clip_stops_already():
    inside = [t for t in range(8) if MASK[t] and 0.5 < by_hand()[t] < 2.0]
    old = torch.tensor(LOG_PROBS, dtype=torch.float64)
    stopped = inside[0]
    old[stopped] -= 2.0 if ADVANTAGES[stopped] > 0 else -2.0
    options = {"clip_cov_lb": 0.5, "clip_cov_ub": 2.0, "clip_cov_ratio": 1.0, "clip_ratio_low": 0.5}
    chosen = mark_clip_cov(batch(old_log_probs=old), 0, **options)["covariance_chosen"]
    assert chosen.nonzero().flatten().tolist() == inside[1:]
