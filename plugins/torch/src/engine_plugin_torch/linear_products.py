"""Products of linear layers in float32 by oneDNN where that is the quicker library: on processors of AMD with AVX-512.

torch takes MKL for them. On a Zen 4, a core of which can do about 110, that is 80 to 84 GFLOP/s and oneDNN 95 to 102
(2,176 tokens, 256 x 1,024). The product that gives the gradient of the weights is as quick by MKL, and stays there.
Other types, autocast among them, have oneDNN anyway.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST_ROWS = 32  # tokens: with fewer neither library is the quicker one
LEAST_WIDTH = 64  # of a layer, in and out: those of low rank stay as they are


def use_quicker_products(module: nn.Module) -> int:
    """Where this processor has a quicker library than torch takes: the module's plain linear layers use it.

    Names and parameters stay as they are, results but for rounding.

    Returns:
        How many layers.
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
    """``layer(hidden)``, [..., in] -> [..., out]."""
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
    """[..., in] and [out, in] -> [..., out]; the weight may be strided."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_hidden, of_weight, _ = ctx.needs_input_grad
        # below an adapter the weight is frozen, and what came in is not to be held for it
        ctx.save_for_backward(hidden if of_weight else None, weight if of_hidden else None)
        return _product(hidden, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            _product(grad, weight.t()) if of_hidden else None,
            rows.t() @ hidden.flatten(0, -2) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
