"""Sequence losses with their own aggregation are the papers' objectives, differentiated as sequences."""

import pytest
import torch

from engine_core import builtin
from engine_core.algorithms.objectives import with_weights
from engine_core.types import Batch
from engine_plugin_trainers import plugin as trainers
from engine_plugin_trainers.algorithms.losses import mean_by_sequence, sum_by_sequence

LOSSES = {**builtin.engine_losses(), **trainers.engine_losses()}
LENGTHS, ADVANTAGES = [3, 5, 2], [1.0, -2.0, 0.5]


def made(scale):
    generator = torch.Generator().manual_seed(1)
    new = -torch.rand(10, generator=generator, dtype=torch.float64)
    batch = Batch(
        token_ids=torch.zeros(10, dtype=torch.int64),
        lengths=torch.tensor(LENGTHS),
        tokens={
            "loss_mask": torch.tensor([0, 1, 1, 0, 1, 1, 0, 1, 0, 1], dtype=torch.bool),
            "old_log_probs": new - scale * torch.randn(10, generator=generator, dtype=torch.float64),
            "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64).repeat_interleave(
                torch.tensor(LENGTHS)
            ),
        },
    )
    return new, batch


def objective(name, batch, leaf):
    """The mean over sequences of the paper's own term, s differentiated directly."""
    total = 0
    for start, n, a in zip([0, 3, 8], LENGTHS, ADVANTAGES, strict=True):
        keep = [t for t in range(start, start + n) if batch["loss_mask"][t]]
        difference = leaf[keep] - batch["old_log_probs"][keep]
        if name == "gmpo":
            held = difference.clamp(max=0.4) if a > 0 else difference.clamp(min=-0.4)
            total = total - a * held.mean().exp() / 3
            continue
        s = difference.mean().exp()
        term = torch.maximum(-s * a, -s.clamp(1 - 3e-4, 1 + 4e-4) * a)
        total = total + term * (len(keep) if name == "luspo" else 1) / 3
    return total


@pytest.mark.parametrize("scale", [1e-4, 0.3])
@pytest.mark.parametrize("name", ["gspo", "luspo", "gmpo"])
def test_with_its_own_aggregation_it_is_the_sequence_objective(name, scale):
    new, batch = made(scale)
    spec = LOSSES[name]
    leaf, other = new.clone().requires_grad_(), new.clone().requires_grad_()
    losses, _ = spec.resolve()({"log_probs": leaf}, batch)
    total = (with_weights(batch, spec.aggregation)["weights"] * losses).sum()
    total.backward()
    expected = objective(name, batch, other)
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)  # the weights are float32
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-6, atol=1e-9)


def test_sums_and_means_are_over_loss_tokens_and_0_where_there_are_none():
    batch = Batch(
        token_ids=torch.zeros(4, dtype=torch.int64),
        lengths=torch.tensor([3, 1]),
        tokens={"loss_mask": torch.tensor([False, True, True, False])},
    )
    values = torch.tensor([100.0, 1.0, 4.0, float("nan")])
    assert sum_by_sequence(batch, values).tolist() == [5.0, 0.0]
    assert mean_by_sequence(batch, values).tolist() == [2.5, 0.0]
