import math

import pytest
import torch

from engine_core.algorithms.kl import kl_estimate


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(-d) - 1 + d)],
)
def test_each_estimator_is_its_formula(estimator, formula):
    policy, reference = [-1.0, -0.5, -3.0], [-1.2, -0.1, -3.0]
    found = kl_estimate(torch.tensor(policy), torch.tensor(reference), estimator)
    assert found.tolist() == pytest.approx(
        [formula(p - r) for p, r in zip(policy, reference, strict=True)], abs=1e-6
    )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_average_to_the_true_kl(estimator):
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.5, 0.25, 0.25]).double()
    true = (p * (p / q).log()).sum()
    assert (p * kl_estimate(p.log(), q.log(), estimator)).sum().item() == pytest.approx(true.item())


def test_k3_does_not_overflow_on_an_impossible_token():
    assert kl_estimate(torch.tensor([-200.0]), torch.tensor([0.0]), "k3").isfinite().all()


def test_an_unknown_estimator_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'k9'\. Known: k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k9")
