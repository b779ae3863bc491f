"""Float32 products of linear layers with oneDNN, which is faster than MKL on AMD processors with AVX-512.

torch uses MKL for them. On one Zen 4 core, whose peak is about 110 GFLOP/s, MKL reaches 80 to 84 GFLOP/s and oneDNN 95
to 102 (2,176 tokens, 256 x 1,024). The product for the gradient of the weights is equally fast in MKL and stays there.
Other types, such as those of autocast, use oneDNN anyway.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST_ROWS = 32  # tokens; with fewer, both libraries are equally fast
LEAST_WIDTH = 64  # of a layer's input and output; layers of low rank stay unchanged


def use_quicker_products(module: nn.Module) -> int:
    """Make the module's plain linear layers use oneDNN where it is faster on this processor.

    Names and parameters stay the same; results change only by rounding.

    Returns:
        Number of layers that were changed.
    """
    if not _is_quicker():
        return 0
    layers = [part for part in module.modules() if type(part) is nn.Linear and _is_plain(part)]
    for layer in layers:
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def _is_plain(layer: nn.Linear) -> bool:
    plain = layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu"
    return plain and "forward" not in vars(layer) and min(layer.weight.shape) >= LEAST_WIDTH


@functools.cache
def _is_quicker() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "AuthenticAMD" not in cpuinfo.read_text():
        return False
    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    operator = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return libraries and operator and torch.cpu._is_avx512_supported()


def _forward(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Compute ``layer(hidden)``: [..., in] -> [..., out]."""
    weight, bias = layer.weight, layer.bias
    usual = (
        hidden.dtype != torch.float32
        or weight.dtype != torch.float32
        or torch.is_autocast_enabled("cpu")
        or hidden.numel() < LEAST_ROWS * hidden.shape[-1]
        or not torch.backends.mkldnn.enabled
    )
    if usual:
        return F.linear(hidden, weight, bias)
    if not torch.is_grad_enabled():
        return _product(hidden, weight, bias)
    found: Tensor = _Linear.apply(hidden, weight, bias)
    return found


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply [..., in] and [out, in] -> [..., out]; the weight may be strided."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``hidden @ weight.T + bias``: ``hidden: [..., I]``, ``weight: [O, I]``, result ``[..., O]``."""
        of_hidden, of_weight, _ = ctx.needs_input_grad
        # below an adapter the weight is frozen, so the input need not be kept for its gradient
        ctx.save_for_backward(hidden if of_weight else None, weight if of_hidden else None)
        return _product(hidden, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden ``[..., I]``, weight ``[O, I]`` and bias ``[O]``, None where not needed."""
        hidden, weight = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            _product(grad, weight.t()) if of_hidden else None,
            rows.t() @ hidden.flatten(0, -2) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
