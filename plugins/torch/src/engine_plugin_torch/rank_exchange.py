"""Two differentiable collectives for ranks that share the tokens of a pack: an all-to-all and a sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(torch.autograd.Function):
    """An all-to-all: each rank sends equal parts along one dimension and receives parts along another.

    ``Exchange.apply(tensor, group, given, taken)``. With heads and tokens this is the all-to-all of DeepSpeed-Ulysses
    (https://arxiv.org/abs/2309.14509). The size of dimension ``given`` must be divisible by the size of the group.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, given: int, taken: int) -> Tensor:
        """Split ``[D0, ...]`` along ``given``; the received parts are joined along ``taken``."""
        ctx.group, ctx.given, ctx.taken = group, given, taken
        return _exchange(tensor, group, given, taken)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Exchange the gradient ``[D0, ...]`` back: split along ``taken``, joined along ``given``."""
        return _exchange(gradients[0], ctx.group, ctx.taken, ctx.given), None, None, None


class Together(torch.autograd.Function):
    """A sum over a group whose ranks all compute the same from it; each rank's gradient passes through unchanged.

    ``Together.apply(tensor, group)`` sums terms of the ranks, or tensors that are 0 outside each rank's own part.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Sum ``[D0, ...]`` over the group; integer sums are not differentiable."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=group)
        if not tensor.is_floating_point():
            ctx.mark_non_differentiable(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient ``[D0, ...]`` unchanged."""
        return gradients[0], None


def _exchange(tensor: Tensor, group: dist.ProcessGroup, given: int, taken: int) -> Tensor:
    sent = torch.stack(tensor.chunk(group.size(), given)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received), dim=taken)
