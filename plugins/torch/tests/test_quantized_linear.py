"""Quantised layers against their definitions, worked out one weight at a time in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine_plugin_torch.quantized_linear import QuantizedLinear

METHODS = ["int8", "fp8", "nf4", "fp4"]
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
]  # QLoRA, appendix E
FP4 = [
    sign * v / 12 for sign in (1, -1) for v in (0, 0.0625, 2, 3, 4, 6, 8, 12)
]  # 1 sign, 2 exponent, 1 mantissa bits
FP8 = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).double().tolist()


def nearest(value, values):
    return min((abs(value - v), v) for v in values if v == v)[1]


def layer_of(method, shape=(6, 40), dtype=torch.float32, bias=True, seed=0):
    torch.manual_seed(seed)
    layer = nn.Linear(shape[1], shape[0], bias=bias, dtype=dtype).requires_grad_(False)
    layer.weight *= torch.logspace(-2, 2, shape[0])[:, None].to(dtype)  # rows of very different size
    return layer, QuantizedLinear(layer, method)


@pytest.mark.parametrize(("method", "largest"), [("int8", 127), ("fp8", 448)])
def test_a_row_of_8_bits_is_rounded_to_multiples_of_its_largest_weight(method, largest):
    layer, quantized = layer_of(method)
    values = range(-127, 128) if method == "int8" else FP8
    for row, found in zip(layer.weight.double().tolist(), quantized.weight.double().tolist(), strict=True):
        scale = max(map(abs, row)) / largest
        expected = [scale * nearest(w / scale, values) for w in row]
        assert found == pytest.approx(expected, rel=1e-6, abs=scale * 1e-5)


@pytest.mark.parametrize(("method", "values"), [("nf4", NF4), ("fp4", FP4)])
@pytest.mark.parametrize("shape", [(6, 40), (48, 32), (5, 7), (64, 64)])
def test_64_weights_of_4_bits_are_rounded_to_shares_of_their_largest(method, values, shape):
    layer, quantized = layer_of(method, shape)
    flat, found = layer.weight.flatten().double().tolist(), quantized.weight.flatten().double().tolist()
    blocks = [flat[i : i + 64] for i in range(0, len(flat), 64)]
    sizes = [max(map(abs, block)) for block in blocks]
    spread = max(abs(size - sum(sizes) / len(sizes)) for size in sizes)  # of the scales, which have 8 bits
    for at, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        expected = [size * nearest(w / size, values) for w in block]
        assert found[64 * at : 64 * at + len(block)] == pytest.approx(
            expected, rel=0, abs=0.02 * spread + 1e-5 * size
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_are_those_of_the_rounded_weight(method, dtype):
    layer, quantized = layer_of(method, dtype=dtype)
    x = torch.randn(3, 5, 40, dtype=dtype, requires_grad=True)
    direction = torch.randn(3, 5, 6, dtype=dtype)
    y = quantized(x)
    (found,) = torch.autograd.grad((y * direction).sum(), x)
    weight = quantized.dequantized(torch.float64)
    near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.5}
    torch.testing.assert_close(y.double(), x.double() @ weight.T + layer.bias.double(), **near)
    torch.testing.assert_close(found.double(), direction.double() @ weight, **near)
    assert y.dtype == dtype
    assert quantized.weight.dtype == dtype


@pytest.mark.parametrize("method", METHODS)
def test_the_result_is_the_same_with_and_without_gradient_and_in_float64_batches(method):
    _, quantized = layer_of(method)
    x = torch.randn(4, 40)
    with torch.no_grad():
        alone = quantized(x)
    assert torch.equal(quantized(x.requires_grad_()), alone)
    rows = torch.stack([quantized(row) for row in x.double()])
    torch.testing.assert_close(rows, quantized(x.double()), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_the_backward_pass_keeps_no_whole_weight(method):
    _, quantized = layer_of(method, (64, 64), bias=False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        quantized(torch.randn(2, 64, requires_grad=True)).sum().backward()
    assert torch.Size([64, 64]) not in kept


def test_under_autocast_the_product_is_taken_in_its_type():
    _, quantized = layer_of("int8")
    x = torch.randn(2, 40)
    with torch.autocast("cpu", torch.bfloat16):
        found = quantized(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, quantized(x.bfloat16()))


@pytest.mark.parametrize("method", METHODS)
def test_a_stored_weight_is_what_a_new_layer_would_hold(method):
    layer, quantized = layer_of(method)
    other, expected = layer_of(method, seed=1)
    quantized.store(other.weight)
    assert torch.equal(quantized.weight, expected.weight)
    assert not torch.equal(quantized.weight, QuantizedLinear(layer, method).weight)


@pytest.mark.parametrize(("method", "bits"), [("int8", 8), ("fp8", 8), ("nf4", 4), ("fp4", 4)])
def test_a_weight_takes_its_bits(method, bits):
    _, quantized = layer_of(method, (256, 1024), bias=False)
    size = sum(t.numel() * t.element_size() * 8 for t in quantized.buffers()) / (256 * 1024)
    assert bits <= size < bits + 0.18
    assert not list(quantized.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_a_row_of_zeros_stays_zero(method):
    layer = nn.Linear(64, 2, bias=False)
    nn.init.zeros_(layer.weight)
    assert torch.equal(QuantizedLinear(layer, method).weight, torch.zeros(2, 64))
