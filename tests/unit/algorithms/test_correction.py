"""Weights and masks against loops over sequences in plain arithmetic."""

import math

import pytest
import torch

from engine_core.algorithms.correction import (
    Correction,
    importance_weights,
    kept_tokens,
    left_behind,
    mismatch_metrics,
    normalizing_scale,
    rollout_log_ratio,
)
from engine_core.types import Batch
from engine_plugin_torch.log_probs import gather_outputs

RATIOS = [[1.5, 4.0], [0.51], [1.02, 0.99, 1.0], [1.009, 1.008, 1.009], [1e-12], [1e12, 1e-3], []]
"""pi / pi_rollout at the loss tokens of each sequence; each also has one prompt token."""


def made(ratios=RATIOS, advantages=None):
    """The batch, and the trained policy's log-probs."""
    lengths = [1 + len(row) for row in ratios]
    mask = [bit for row in ratios for bit in (0, *[1] * len(row))]
    log_ratio = [value for row in ratios for value in (0.0, *[math.log(r) for r in row])]
    rollout = torch.linspace(-3, -0.5, sum(lengths), dtype=torch.float64)
    tokens = {"loss_mask": torch.tensor(mask, dtype=torch.bool), "rollout_log_probs": rollout}
    if advantages is not None:
        per_token = [a for row, a in zip(ratios, advantages, strict=True) for _ in range(1 + len(row))]
        tokens["advantages"] = torch.tensor(per_token, dtype=torch.float64)
    batch = Batch(
        token_ids=torch.zeros(sum(lengths), dtype=torch.int64), lengths=torch.tensor(lengths), tokens=tokens
    )
    return batch, rollout + torch.tensor(log_ratio, dtype=torch.float64)


def at_loss_tokens(batch, values):
    """Nested lists in the shape of ``RATIOS``."""
    parts = values.split(batch.lengths.tolist())
    return [part[1:].tolist() for part in parts]


def weights(ratios=RATIOS, **settings):
    batch, log_probs = made(ratios)
    found = importance_weights(batch, rollout_log_ratio(batch, log_probs), Correction(**settings))
    return at_loss_tokens(batch, found)


def kept(ratios=RATIOS, **settings):
    batch, log_probs = made(ratios)
    found = kept_tokens(batch, rollout_log_ratio(batch, log_probs), Correction(**settings))
    return at_loss_tokens(batch, found)


def nested(expected):
    return [pytest.approx(row, rel=1e-9) for row in expected]


def geometric(row):
    return math.exp(sum(map(math.log, row)) / len(row)) if row else 1.0


def test_token_weights_are_the_capped_ratio():
    floor = math.exp(-20)  # no weight is so small that it is 0, none so large that it is infinite
    assert weights(level="token") == nested([[min(max(r, floor), 2.0) for r in row] for row in RATIOS])
    assert weights(level="token", cap=3.0)[0] == nested([[1.5, 3.0]])[0]


def test_sequence_weights_are_the_capped_product():
    products = [math.prod(row) for row in RATIOS]
    floor, most = math.exp(-20), 5.0
    expected = [[min(max(p, floor), most)] * len(row) for p, row in zip(products, RATIOS, strict=True)]
    assert weights(level="sequence", cap=5.0) == nested(expected)


def test_a_mask_of_the_same_level_bounds_the_weights_in_place_of_the_cap():
    assert Correction(level="token", mask="token").weight_cap == 5.0
    assert Correction(level="token", mask="token", mask_high=3.0).weight_cap == 3.0
    assert Correction(level="sequence", mask="sequence").weight_cap == 2.0
    assert Correction(level="token", mask="geometric").weight_cap == 2.0
    assert Correction(level="token", mask="token", cap=1.5).weight_cap == 1.5


def test_off_gives_neither_weights_nor_mask():
    batch, log_probs = made()
    log_ratio = rollout_log_ratio(batch, log_probs)
    assert importance_weights(batch, log_ratio, Correction()) is None
    assert kept_tokens(batch, log_ratio, Correction()) is None


def test_icepop_keeps_tokens_within_its_bounds():
    assert kept(mask="token") == [[0.5 <= r <= 5.0 for r in row] for row in RATIOS]
    assert kept(mask="token", mask_low=0.8, mask_high=2.0) == [
        [0.8 <= r <= 2.0 for r in row] for row in RATIOS
    ]


@pytest.mark.parametrize(
    ("mask", "of", "low", "high"),
    [
        ("sequence", math.prod, 0.5, 2.0),
        ("geometric", geometric, 0.99, 1.01),
        ("sequence", math.prod, 0.1, 7.0),
    ],
)
def test_sequence_masks_keep_or_drop_a_whole_sequence(mask, of, low, high):
    expected = [[low <= of(row) <= high] * len(row) for row in RATIOS]
    assert kept(mask=mask, mask_low=low, mask_high=high) == expected
    assert {value for row in expected for value in row} == {True, False}


@pytest.mark.parametrize("ratio", [1.05, 1.5, 3.0])
@pytest.mark.parametrize(
    ("estimator", "k"),
    [
        ("k1", lambda r: -math.log(r)),
        ("k2", lambda r: math.log(r) ** 2 / 2),
        ("k3", lambda r: r - 1 - math.log(r)),
    ],
)
def test_rejection_compares_the_mean_with_the_estimator_at_one_ratio(estimator, k, ratio):
    ratios = [[1.5, 1.0], [1 / 1.5, 1.0], [1.02, 0.99], [2.9, 2.9], [0.34, 0.34], [20.0, 0.05]]
    expected = [[abs(sum(map(k, row)) / len(row)) <= abs(k(ratio))] * len(row) for row in ratios]
    assert kept(ratios, reject=estimator, reject_ratio=ratio) == expected


def test_the_bounds_of_k1_are_on_the_ratio_and_not_on_its_inverse():
    assert kept([[2.9], [0.4], [0.3]], reject="k1", reject_ratio=3.0) == [[True], [True], [False]]
    assert kept([[3.9], [0.26]], mask="geometric", mask_low=0.5, mask_high=4.0) == [[True], [False]]


def test_mask_and_rejection_together_keep_what_both_keep():
    ratios = [[1.0, 1.0, 9.0], [1.0, 1.3], [1.0, 1.0]]
    both = kept(ratios, mask="token", mask_low=0.8, mask_high=1.2, reject="k1", reject_ratio=1.5)
    assert both == [[False, False, False], [True, False], [True, True]]


def test_weights_carry_no_gradient():
    batch, log_probs = made()
    leaf = log_probs.clone().requires_grad_()
    log_ratio = rollout_log_ratio(batch, leaf)
    assert not importance_weights(batch, log_ratio, Correction(level="token")).requires_grad


@pytest.mark.parametrize("settings", [{"level": "token"}, {"level": "sequence", "mask": "token"}])
def test_normalized_weights_have_the_mean_one_over_the_kept_tokens(settings):
    correction = Correction(**settings)
    batch, log_probs = made()
    log_ratio = rollout_log_ratio(batch, log_probs)
    batch = batch.with_columns(tokens={"correction_scale": normalizing_scale(batch, log_probs, correction)})
    found = importance_weights(batch, log_ratio, correction)
    counted = batch["loss_mask"].clone()
    if correction.mask != "off":
        counted &= kept_tokens(batch, log_ratio, correction)
    assert counted.sum() > 0
    assert found[counted].mean().item() == pytest.approx(1.0)


def test_a_mini_batch_that_is_masked_whole_is_not_scaled():
    batch, log_probs = made([[100.0], [50.0]])
    scale = normalizing_scale(batch, log_probs, Correction(level="token", mask="token"))
    assert scale.tolist() == [1.0] * 4


@pytest.mark.parametrize("settings", [{"level": "sequence"}, {"level": "token", "mask": "geometric"}])
def test_a_sequence_is_weighed_the_same_in_any_split_and_order(settings):
    correction = Correction(**settings, reject="k3")
    batch, log_probs = made()
    log_ratio = rollout_log_ratio(batch, log_probs)
    whole = importance_weights(batch, log_ratio, correction), kept_tokens(batch, log_ratio, correction)
    batch = batch.with_columns(tokens={"place": torch.arange(batch.num_tokens)})
    for rows in ([5, 0], [4, 2, 3], [1]):
        part = batch.select(rows)
        places = part["place"]
        assert torch.equal(importance_weights(part, log_ratio[places], correction), whole[0][places])
        assert torch.equal(kept_tokens(part, log_ratio[places], correction), whole[1][places])


def test_off_policy_masking_drops_bad_samples_that_the_policy_has_left():
    ratios = [[0.5, 0.4], [0.5, 0.4], [1.5, 0.9], [0.9, 0.8]]
    batch, log_probs = made(ratios, advantages=[-1.0, 1.0, -1.0, -1.0])
    found = at_loss_tokens(batch, left_behind(batch, log_probs, threshold=0.3))
    gone = [-sum(map(math.log, row)) / 2 > 0.3 for row in ratios]
    assert gone == [True, True, False, False]
    assert found == [[True, True], [False, False], [False, False], [False, False]]


def test_mismatch_is_measured_on_sampled_tokens():
    batch, log_probs = made([[1.5, 4.0], [0.5]])
    elsewhere = ~batch["loss_mask"] * 3.0
    found = mismatch_metrics(rollout_log_ratio(batch, log_probs + elsewhere))
    expected = [0, 0.5 - math.log(1.5), 3 - math.log(4), 0, -0.5 - math.log(0.5)]
    assert found["mismatch/kl"].tolist() == pytest.approx(expected)
    assert found["max/mismatch/max_abs"].max().item() == pytest.approx(math.log(4))


def test_a_cut_distribution_is_no_gap():
    """Ten words, sampled with top-k = 3 by the very policy that is trained: every weight is 1."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -2.5], dtype=torch.float64)
    full = logits.log_softmax(0)
    support = full.topk(3).indices
    mass = full[support].logsumexp(0)
    renormalized = full[support] - mass  # what the sampler drew from
    batch = Batch(
        token_ids=support,
        lengths=torch.tensor([3]),
        tokens={
            "loss_mask": torch.ones(3, dtype=torch.bool),
            "rollout_log_probs": renormalized + mass,  # as Batch.from_rollouts makes them
        },
    )
    log_ratio = rollout_log_ratio(batch, full[support])
    assert importance_weights(batch, log_ratio, Correction(level="token")).tolist() == pytest.approx(
        [1.0] * 3
    )
    moved = (logits * 1.3).log_softmax(0)  # another policy, over the whole vocabulary and over the support
    over_support = moved[support] - moved[support].logsumexp(0) - renormalized
    over_all = rollout_log_ratio(batch, moved[support])
    difference = (moved[support].logsumexp(0) - mass).expand(3)
    torch.testing.assert_close(over_all - over_support, difference)


def test_weights_over_the_replayed_support_are_those_of_importance_sampling():
    """``sum_y q(y) w(y) f(y) = sum_y pi(y | S) f(y)``: with weights over all tokens it is pi's mass of S over q's times that."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5], dtype=torch.float64)
    moved = logits + torch.tensor([-1.0, 0.5, 0.3, 0.0, 2.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    kept = logits.softmax(0).topk(3).indices  # drawn from these by the policy of `logits`
    q = logits.softmax(0)[kept] / logits.softmax(0)[kept].sum()
    over_kept = moved.softmax(0)[kept] / moved.softmax(0)[kept].sum()
    f = torch.tensor([3.0, -1.0, 7.0], dtype=torch.float64)
    batch = Batch(
        token_ids=kept,
        lengths=torch.tensor([3]),
        tokens={"loss_mask": torch.ones(3, dtype=torch.bool), "rollout_log_probs": q.log()},
    )
    correction = Correction(level="token", cap=100.0)
    columns = {"support_ids": kept.int().expand(3, 3)}
    options = {"temperature": 1.0, "chunk": 2, "columns": columns}
    for policy, expected in ((logits, q), (moved, over_kept)):
        log_probs = gather_outputs(lambda x: x, policy.expand(3, -1), kept, **options)["log_probs"]
        weights = importance_weights(batch, rollout_log_ratio(batch, log_probs), correction)
        assert float((q * weights).sum()) == pytest.approx(1.0, abs=1e-12)
        assert float((q * weights * f).sum()) == pytest.approx(float((expected * f).sum()), abs=1e-12)
    ratio = moved.softmax(0)[kept].sum() / logits.softmax(0)[kept].sum()
    whole = moved.log_softmax(0)[kept] - logits.log_softmax(0)[kept]
    assert float((q * whole.exp()).sum()) == pytest.approx(
        float(ratio)
    )  # not 1: the bias of the whole vocabulary
    assert abs(float(ratio) - 1) > 0.1
