import pytest
import torch

from engine_core.algorithms.losses import value
from engine_core.algorithms.objectives import resolve_loss
from engine_core.plugins import PluginSet
from engine_core.types import Batch, LossCall


def run(values, old, returns, value_clip):
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    batch = Batch(
        token_ids=torch.zeros(len(values), dtype=torch.int64),
        lengths=torch.tensor([len(values)]),
        tokens={"values": torch.tensor(old).double(), "returns": torch.tensor(returns).double()},
    )
    loss, metrics = value({"values": leaf}, batch, value_clip=value_clip)
    loss.sum().backward()
    return loss.tolist(), leaf.grad.tolist(), metrics


@pytest.mark.parametrize(
    ("new", "old", "target", "loss", "slope"),
    [
        (1.0, 0.9, 2.0, 0.5, -1.0),  # inside the clip: half the square
        (1.0, 0.0, 2.0, 0.5 * 1.5**2, 0.0),  # went further than 0.5 towards its target: no more
        (-1.0, 0.0, 2.0, 0.5 * 3.0**2, -3.0),  # went the wrong way: the larger error, whole gradient
        (2.0, 2.0, 2.0, 0.0, 0.0),
    ],
)
def test_the_clip_stops_only_a_value_that_went_far_towards_its_target(new, old, target, loss, slope):
    found, gradient, _ = run([new], [old], [target], 0.5)
    assert found[0] == pytest.approx(loss)
    assert gradient[0] == pytest.approx(slope)


def test_without_a_clip_it_is_half_the_squared_error():
    found, gradient, metrics = run([1.0, -4.0], [100.0, 100.0], [3.0, -4.5], None)
    assert found == pytest.approx([2.0, 0.125])
    assert gradient == pytest.approx([-2.0, 0.5])
    assert metrics["clip_fraction"].sum() == 0


def test_the_objective_weighs_its_tokens():
    batch = Batch(
        token_ids=torch.zeros(3, dtype=torch.int64),
        lengths=torch.tensor([3]),
        tokens={
            "weights": torch.tensor([0.0, 0.5, 0.5]),
            "token_share": torch.tensor([0.0, 0.5, 0.5]),
            "values": torch.zeros(3),
            "returns": torch.tensor([float("nan"), 1.0, 3.0]),
        },
    )
    total, metrics = resolve_loss(LossCall("value", {"value_clip": 10.0}, ("values",)), PluginSet())(
        {"values": torch.zeros(3)}, batch
    )
    assert total.item() == pytest.approx((0.5 + 4.5) / 2)
    assert metrics["critic/return_mean"].item() == pytest.approx(2.0)
    assert metrics["critic/value_mean"].item() == 0


def test_a_value_within_the_clip_counts_as_not_clipped_whatever_the_rounding():
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1000, generator=generator)
    new = torch.randn(1000, generator=generator)
    assert (old + (new - old) != new).any()  # in float32
    batch = Batch(
        token_ids=torch.zeros(1000, dtype=torch.int64),
        lengths=torch.tensor([1000]),
        tokens={"values": old, "returns": torch.randn(1000, generator=generator)},
    )
    assert value({"values": new}, batch, value_clip=100.0)[1]["clip_fraction"].sum() == 0
