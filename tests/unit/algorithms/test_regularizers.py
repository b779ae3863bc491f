import math

import pytest
import torch

from engine_core.algorithms.regularizers import (
    ESTIMATORS,
    AdaptiveEntropy,
    AdaptiveKL,
    high_entropy,
    kl_estimate,
)

FORMULAS = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}
SLOPES = {
    "k1": lambda d: 1.0,
    "abs": lambda d: math.copysign(1.0, d) if d else 0.0,
    "k2": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
    "k1+": lambda d: d,  # the gradient of k2
    "k3+": lambda d: d,
}
POLICY, REFERENCE = [-1.0, -0.5, -3.0, -0.1, -9.0], [-1.2, -0.1, -3.0, -7.0, -0.2]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_value_and_gradient_of_each_estimator(estimator):
    leaf = tensor(POLICY).requires_grad_()
    found = kl_estimate(leaf, tensor(REFERENCE), estimator)
    found.sum().backward()
    differences = [p - r for p, r in zip(POLICY, REFERENCE, strict=True)]
    formula = FORMULAS[estimator.removesuffix("+")]
    assert found.tolist() == pytest.approx([formula(d) for d in differences])
    assert leaf.grad.tolist() == pytest.approx([SLOPES[estimator](d) for d in differences])


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+"])
def test_k1_and_k3_average_to_the_true_kl(estimator):
    p, q = tensor([0.7, 0.2, 0.1]), tensor([0.5, 0.25, 0.25])
    true = (p * (p / q).log()).sum()
    assert (p * kl_estimate(p.log(), q.log(), estimator)).sum().item() == pytest.approx(true.item())


def expected_gradient(estimator):
    """Of the estimator as a loss, in expectation over samples of the policy, by enumeration."""
    logits = tensor([0.3, -0.4, 1.1]).requires_grad_()
    q = tensor([0.5, 0.25, 0.25])
    log_p = logits.log_softmax(0)
    (log_p.detach().exp() * kl_estimate(log_p, q.log(), estimator)).sum().backward()
    return logits.grad


def true_gradient(forward):
    logits = tensor([0.3, -0.4, 1.1]).requires_grad_()
    q, p = tensor([0.5, 0.25, 0.25]), logits.softmax(0)
    ((q * (q / p).log()).sum() if forward else (p * (p / q).log()).sum()).backward()
    return logits.grad


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_on_policy_their_gradient_is_that_of_the_kl_to_the_reference(estimator):
    torch.testing.assert_close(expected_gradient(estimator), true_gradient(forward=False))


def test_on_policy_the_gradient_of_k1_is_nothing_and_that_of_k3_of_the_other_direction():
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient("k3"), true_gradient(forward=True))


@pytest.mark.parametrize("estimator", ["k3", "k3+"])
def test_k3_does_not_overflow_on_an_impossible_token(estimator):
    assert kl_estimate(torch.tensor([-200.0]), torch.tensor([0.0]), estimator).isfinite().all()


def test_an_unknown_estimator_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'k9'\. Known: k1, abs, k2, k3, k1\+, k3\+"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k9")


@pytest.mark.parametrize(("kl", "error"), [(0.11, 0.1), (0.1, 0.0), (5.0, 0.2), (0.0, -0.2), (0.095, -0.05)])
def test_the_coefficient_follows_ziegler(kl, error):
    held = AdaptiveKL(0.5)
    held.update(kl, target=0.1, horizon=1000.0, num_rollouts=64)
    assert held.coef == pytest.approx(0.5 * (1 + error * 64 / 1000))


@pytest.mark.parametrize(("kl", "coef"), [(0.0, 0.4), (5.0, 0.6)])
def test_a_step_of_more_rollouts_than_the_horizon_changes_the_coefficient_by_a_fifth(kl, coef):
    held = AdaptiveKL(0.5)
    held.update(kl, target=0.1, horizon=100.0, num_rollouts=1024)
    assert held.coef == pytest.approx(coef)


def test_the_weight_rises_under_the_target_falls_over_it_and_never_below_0():
    held = AdaptiveEntropy(0.0)
    seen = []
    for entropy in (0.1, 0.1, 0.2, 0.9, 0.9, 0.1):
        held.update(entropy, target=0.2, delta=0.01)
        seen.append((round(held.coef, 6), round(held.applied, 6)))
    assert seen == [(0.01, 0.01), (0.02, 0.02), (0.01, 0.01), (0.0, 0.0), (0.0, 0.0), (0.01, 0.01)]


def test_it_is_applied_only_while_the_entropy_is_at_most_the_target():
    held = AdaptiveEntropy(0.5)
    assert held.applied == 0.5  # nothing was measured yet
    held.update(0.3, target=0.2, delta=0.01)
    assert (held.applied, held.coef) == (0.0, pytest.approx(0.49))


@pytest.mark.parametrize(
    ("share", "kept"), [(0.2, {4}), (0.21, {4, 2}), (0.5, {4, 2, 5}), (1.0, {1, 2, 3, 4, 5})]
)
def test_the_share_of_loss_tokens_with_the_highest_entropy_is_kept(share, kept):
    entropy = torch.tensor([9.0, 0.1, 0.8, 0.2, 0.9, 0.3, 9.0])
    mask = torch.tensor([0, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
    assert set(high_entropy(entropy, mask, share).nonzero().flatten().tolist()) == kept


def test_ties_at_the_bound_are_all_kept_and_no_token_gives_none():
    tied = torch.full((3,), 0.5)
    assert high_entropy(tied, torch.ones(3, dtype=torch.bool), 0.3).all()
    assert not high_entropy(tied, torch.zeros(3, dtype=torch.bool), 0.3).any()
