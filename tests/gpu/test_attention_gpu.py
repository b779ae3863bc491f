"""Attention 'varlen' on an accelerator against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine_plugin_torch import attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator"),
]

LENGTHS = [50, 1, 170, 40, 55, 300]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (16, None), (16, 5.0)])
def test_a_pack_on_the_accelerator_is_what_float64_gives_on_the_cpu(dtype, window, softcap):
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    pack = [torch.randn(1, heads, sum(LENGTHS), 64, dtype=dtype) for heads in (8, 2, 2)]
    direction = torch.randn(1, sum(LENGTHS), 8, 64)

    def run(tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        arguments = attention.packed_arguments(torch.tensor(LENGTHS), leaves[0].device)
        out, _ = attention.varlen(
            nn.Module(), *leaves, None, scaling=0.125, sliding_window=window, softcap=softcap, **arguments
        )
        return out, torch.autograd.grad((out * direction.to(out)).sum(), leaves)

    found, found_gradients = run([tensor.to(device) for tensor in pack])
    expected, expected_gradients = run([tensor.double() for tensor in pack])
    bound = 2e-5 if dtype == torch.float32 else 0.01
    for one, other in zip((found, *found_gradients), (expected, *expected_gradients), strict=True):
        assert (one.cpu().double() - other).norm() / other.norm() < bound


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel is of CUDA")
def test_under_autocast_float32_goes_through_the_kernel(monkeypatch):
    """Queries and keys of float32 weights are float32 behind their rotary embedding."""
    seen, kernel = [], attention._cuda
    monkeypatch.setattr(attention, "_cuda", lambda q, *rest: seen.append(q.dtype) or kernel(q, *rest))
    pack = [torch.randn(1, heads, sum(LENGTHS), 64, device="cuda") for heads in (8, 2, 2)]
    arguments = attention.packed_arguments(torch.tensor(LENGTHS), pack[0].device)
    expected, _ = attention.varlen(nn.Module(), *pack, None, scaling=0.125, **arguments)
    with torch.autocast("cuda", torch.bfloat16):
        found, _ = attention.varlen(nn.Module(), *pack, None, scaling=0.125, **arguments)
    assert seen == [torch.bfloat16]
    assert (found.float() - expected).norm() / expected.norm() < 0.01
