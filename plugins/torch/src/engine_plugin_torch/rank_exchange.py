"""Two messages between ranks that share the tokens of a pack, with their gradients: tokens for heads, and outputs together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(torch.autograd.Function):
    """Give away equal parts along one dimension, receive the others' parts along another.

    ``Exchange.apply(tensor, group, given, taken)``: of heads and tokens, the all-to-all of DeepSpeed-Ulysses
    (https://arxiv.org/abs/2309.14509). ``given`` must divide by the size of the group.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, given: int, taken: int) -> Tensor:
        ctx.group, ctx.given, ctx.taken = group, given, taken
        return _exchange(tensor, group, given, taken)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _exchange(gradients[0], ctx.group, ctx.taken, ctx.given), None, None, None


class Together(torch.autograd.Function):
    """The sum over a group, whose ranks all compute the same of it: the gradient stays each rank's own.

    ``Together.apply(tensor, group)``: of terms that each rank has, or of tensors that are 0 but for each rank's own part.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total, group=group)
        if not tensor.is_floating_point():
            ctx.mark_non_differentiable(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def _exchange(tensor: Tensor, group: dist.ProcessGroup, given: int, taken: int) -> Tensor:
    sent = torch.stack(tensor.chunk(group.size(), given)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received), dim=taken)
