import math

import pytest
import torch

from engine_core.algorithms.losses import ppo_clip
from engine_core.types import Batch


def run(log_probs, advantages, old=None, **options):
    log_probs = torch.tensor(log_probs, requires_grad=True)
    tokens = {"advantages": torch.tensor(advantages)}
    if old is not None:
        tokens["old_log_probs"] = torch.tensor(old)
    n = len(advantages)
    batch = Batch(token_ids=torch.zeros(n, dtype=torch.int64), lengths=torch.tensor([n]), tokens=tokens)
    loss, metrics = ppo_clip({"log_probs": log_probs}, batch, **options)
    loss.sum().backward()
    return loss.tolist(), log_probs.grad.tolist(), metrics


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_that_of_reinforce():
    loss, gradient, metrics = run([-1.0, -2.0], [2.0, -3.0])
    assert loss == pytest.approx([-2.0, 3.0])
    assert gradient == pytest.approx([-2.0, 3.0])
    assert metrics["ratio_mean"].tolist() == [1.0, 1.0]
    assert metrics["clip_fraction"].sum() == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.1, 1.0, -1.1, -1.1),  # inside the clip
        (1.5, 1.0, -1.2, 0.0),  # pushed up far enough: no more gradient
        (0.5, 1.0, -0.5, -0.5),  # went the wrong way: full gradient
        (0.5, -1.0, 0.8, 0.0),  # pushed down far enough
        (1.5, -1.0, 1.5, 1.5),  # went the wrong way
    ],
)
def test_the_clip_stops_only_moves_that_went_far_enough(ratio, advantage, expected, slope):
    loss, gradient, _ = run([-1.0], [advantage], old=[-1.0 - math.log(ratio)])
    assert loss[0] == pytest.approx(expected, rel=1e-5)
    assert gradient[0] == pytest.approx(slope, rel=1e-5)


def test_the_upper_width_can_be_larger_than_the_lower():
    loss, _, metrics = run([-1.0], [1.0], old=[-1.0 - math.log(1.25)], clip_ratio_high=0.28)
    assert loss[0] == pytest.approx(-1.25)
    assert metrics["clip_fraction"].item() == 0
    loss, _, metrics = run([-1.0], [1.0], old=[-1.0 - math.log(1.5)], clip_ratio_high=0.28)
    assert loss[0] == pytest.approx(-1.28)
    assert metrics["clip_fraction"].item() == 1


def test_dual_clip_bounds_the_cost_of_a_negative_advantage_only():
    loss, gradient, _ = run([-1.0], [-2.0], old=[-1.0 - math.log(10.0)], clip_ratio_c=3.0)
    assert (loss[0], gradient[0]) == (pytest.approx(6.0), 0.0)
    loss, _, _ = run([-1.0], [2.0], old=[-1.0 - math.log(0.1)], clip_ratio_c=3.0)
    assert loss[0] == pytest.approx(-0.2)


def test_approx_kl_is_k3_of_old_and_new():
    ratio = 1.3
    _, _, metrics = run([-1.0], [1.0], old=[-1.0 - math.log(ratio)])
    assert metrics["approx_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-4)
