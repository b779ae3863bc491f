"""Linear layers by oneDNN where it is the quicker library."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from engine_plugin_torch import linear_products
from engine_plugin_torch.linear_products import use_quicker_products

ROWS, IN, OUT = 40, 96, 64


@pytest.fixture
def quicker(monkeypatch):
    """A processor that has a quicker library, whatever this one is; counts what is computed by it."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    calls = []
    product = linear_products._product
    monkeypatch.setattr(linear_products, "_is_quicker", lambda: True)
    monkeypatch.setattr(
        linear_products, "_product", lambda *args: calls.append(args[0].shape) or product(*args)
    )
    return calls


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(IN, OUT, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
def test_results_and_gradients_are_those_of_the_plain_layer(quicker, bias):
    plain, other = layer(bias), layer(bias)
    assert use_quicker_products(nn.Sequential(other)) == 1
    rows, pull = torch.randn(2, ROWS, IN), torch.randn(2, ROWS, OUT)
    found = []
    for one in (plain, other):
        hidden = rows.clone().requires_grad_()
        out = one(hidden)
        out.backward(pull)
        found.append([out, hidden.grad, *(p.grad for p in one.parameters())])
    assert len(quicker) == 2  # forward, and the gradient of what came in
    for expected, result in zip(*found, strict=True):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_with_and_without_gradient_the_result_is_the_same_to_the_bit(quicker):
    one = layer()
    use_quicker_products(one)
    rows = torch.randn(ROWS, IN)
    with torch.no_grad():
        sampled = one(rows)
    assert torch.equal(one(rows), sampled)
    assert len(quicker) == 2


@pytest.mark.parametrize("learns", ["rows", "weight", "bias"])
def test_where_one_of_them_learns_it_has_the_plain_layers_gradient_and_the_others_none(quicker, learns):
    rows, pull = torch.randn(2, ROWS, IN), torch.randn(2, ROWS, OUT)
    found = []
    for own in (False, True):
        one = layer()
        assert use_quicker_products(one) == 1 if own else True
        tensors = {"rows": rows.clone(), "weight": one.weight, "bias": one.bias}
        for name, tensor in tensors.items():
            tensor.requires_grad_(name == learns)
        one(tensors["rows"]).backward(pull)
        assert [name for name, tensor in tensors.items() if tensor.grad is not None] == [learns]
        found.append(tensors[learns].grad)
    assert quicker
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frozen", [True, False])
def test_below_an_adapter_what_came_into_a_layer_is_not_held_for_its_gradient(quicker, frozen):
    """A frozen weight has none, so of the rows nothing is needed."""
    one = layer().requires_grad_(not frozen)
    use_quicker_products(one)
    rows = torch.randn(ROWS, IN, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        out = one(rows)
    assert kept == [one.weight.shape] if frozen else [rows.shape, one.weight.shape]
    out.sum().backward()
    torch.testing.assert_close(rows.grad, one.weight.sum(0).expand(ROWS, IN))


def test_a_copy_computes_with_its_own_weights(quicker):
    one = layer()
    use_quicker_products(one)
    copied = copy.deepcopy(one)
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.zero_()
    assert not copied(torch.randn(ROWS, IN)).any()


def test_few_rows_other_types_and_autocast_are_left_to_torch(quicker):
    one = layer()
    use_quicker_products(one)
    one(torch.randn(linear_products.LEAST_ROWS - 1, IN))
    with torch.autocast("cpu", torch.bfloat16):
        assert one(torch.randn(ROWS, IN)).dtype == torch.bfloat16
    one.to(torch.float64)(torch.randn(ROWS, IN, dtype=torch.float64))
    assert not quicker


def test_other_kinds_of_layers_stay_as_they_are(quicker):
    class Own(nn.Linear):
        pass

    narrow = nn.Linear(IN, 8)
    assert use_quicker_products(nn.Sequential(Own(IN, OUT), narrow, nn.LayerNorm(IN))) == 0


def test_where_no_library_is_quicker_nothing_changes(monkeypatch):
    monkeypatch.setattr(linear_products, "_is_quicker", lambda: False)
    one = layer()
    assert use_quicker_products(one) == 0
    assert "forward" not in vars(one)
