import math

import pytest
import torch

from engine_core.algorithms.correction import importance_weights, mismatch_metrics
from engine_core.types import Batch


def batch():
    return Batch(
        token_ids=torch.zeros(5, dtype=torch.int64),
        lengths=torch.tensor([3, 2]),
        tokens={
            "loss_mask": torch.tensor([False, True, True, False, True]),
            "rollout_log_probs": torch.tensor([0.0, -1.0, -2.0, 0.0, -1.0]),
        },
    )


OLD = torch.tensor([0.0, -1.0 + math.log(1.5), -2.0 + math.log(4.0), 0.0, -1.0 + math.log(0.5)])


def test_token_weights_are_the_capped_ratio():
    assert importance_weights(batch(), OLD, "token", 2.0).tolist() == pytest.approx([1, 1.5, 2.0, 1, 0.5])


def test_sequence_weights_are_the_capped_product():
    weights = importance_weights(batch(), OLD, "sequence", 5.0)
    assert weights.tolist() == pytest.approx([5.0, 5.0, 5.0, 0.5, 0.5])  # 1.5 * 4 = 6 is capped


def test_off_gives_no_weights():
    assert importance_weights(batch(), OLD, "off", 2.0) is None


def test_weights_carry_no_gradient():
    old = OLD.clone().requires_grad_()
    assert not importance_weights(batch(), old, "token", 2.0).requires_grad


def test_mismatch_is_measured_on_sampled_tokens():
    found = mismatch_metrics(batch(), OLD + torch.tensor([3.0, 0, 0, 3.0, 0]))
    assert found["mismatch/kl"].tolist() == pytest.approx(
        [0, 0.5 - math.log(1.5), 3 - math.log(4), 0, -0.5 - math.log(0.5)], abs=1e-6
    )
    assert found["max/mismatch/max_abs"].max().item() == pytest.approx(math.log(4), rel=1e-5)
