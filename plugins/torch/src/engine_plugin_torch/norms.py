"""RMS norms with a backward pass of their own, for training on a CPU.

As modules of transformers write them, a norm is eight operations, and autograd goes back through each. Here the
gradient is written down: with ``y = w * n``, ``n = x / rms(x)`` over H channels it is
``dx = (w * dy - n * mean(w * dy * n)) / rms(x)`` and ``dw = sum over tokens of dy * n``. Forward and backward of 2,176
tokens of 256 channels take 0.4 of the time. The forward pass is the module's, to the bit.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def use_fused_rmsnorm_backward(module: nn.Module) -> int:
    """Give the RMS norms of a module on the CPU the backward pass of this file, where they compute what it is of.

    Names and parameters stay as they are.

    Returns:
        How many norms.
    """
    found = 0
    for part in module.modules():
        if (epsilon := _epsilon(part)) is not None and _is_the_same(part, epsilon):
            part.forward = functools.partial(_forward, part, part.forward, epsilon)
            found += 1
    return found


def _epsilon(part: nn.Module) -> float | None:
    """Of a module that may be an RMS norm with a weight for each channel; else None."""
    if not type(part).__name__.endswith("RMSNorm") or "forward" in vars(part):
        return None
    weight, epsilon = getattr(part, "weight", None), getattr(part, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or not isinstance(epsilon, float):
        return None
    alone = len(list(part.parameters())) == 1 and not list(part.buffers())
    plain = weight.ndim == 1 and weight.device.type == "cpu"
    return epsilon if alone and plain and len(inspect.signature(part.forward).parameters) == 1 else None


@torch.no_grad()
def _is_the_same(part: nn.Module, epsilon: float) -> bool:
    """Whether the module computes what ``_normed`` computes, to the bit: norms of other models add 1 to their weights.

    With weights of its own, for those that are there may all be 0 (of an engine that shows no more of them than the
    shape), and any two norms agree on them; and beside the hooks of the module.
    """
    weight: Any = part.weight
    trial = copy.copy(part)
    own = torch.linspace(0.5, 2.0, len(weight)).to(weight.dtype)
    trial.__dict__["_parameters"] = {"weight": nn.Parameter(own, requires_grad=False)}
    hidden = torch.linspace(-3.0, 5.0, 3 * len(weight)).view(3, -1)
    return all(
        torch.equal(trial.forward(x), _normed(x, own, epsilon)[0]) for x in (hidden, hidden.bfloat16())
    )


def _forward(part: nn.Module, plain: Callable[[Tensor], Tensor], epsilon: float, hidden: Tensor) -> Tensor:
    """``part(hidden)``, [..., H] -> [..., H]."""
    weight: Any = part.weight
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if not learns or torch.float64 in (hidden.dtype, weight.dtype):  # which a gradient in float32 is not for
        return plain(hidden)
    found: Tensor = _RMSNorm.apply(hidden, weight, epsilon)
    return found


def _normed(hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """The norm, what its weight is multiplied with, and 1 / rms [..., 1] in float32."""
    wide = hidden.float()
    rate = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    unit = (wide * rate).to(hidden.dtype)
    return weight * unit, unit, rate


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        result, unit, rate = _normed(hidden, weight, epsilon)
        ctx.save_for_backward(unit, rate, weight)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        unit, rate, weight = ctx.saved_tensors
        grad, scale = grad.float(), weight.float()
        pulled = grad * unit  # [..., H]
        of_weight = pulled.flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        along = (pulled @ scale).unsqueeze(-1).mul_(-1 / len(scale))  # - mean(w * dy * n)
        of_hidden = (grad * scale).addcmul_(unit, along).mul_(rate)
        return of_hidden.to(unit.dtype), of_weight if ctx.needs_input_grad[1] else None, None
