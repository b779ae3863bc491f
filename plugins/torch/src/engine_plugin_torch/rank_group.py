"""The ranks of one engine: their process group, small messages, and differentiable collectives.

The runtime creates the process group. A run of one process gets a group without a socket here, so that one
rank runs the same code as several. The differentiable collectives, an all-to-all and a sum, are for ranks that share
the tokens of a pack.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine_core.contracts.engines import Layout
from engine_core.errors import EnvironmentProblem

_OWN_GROUP = {"users": 0}  # number of engines that use the group of one process created here


class RankGroup:
    """The ranks of one role and their process group.

    Args:
        rank: this rank.
        size: number of ranks.
        device: device of this rank, with its index.

    Raises:
        EnvironmentProblem: the ranks have no common process group.

    Attributes:
        layout: place of this rank in the distribution of data.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.device, self.rank, self.size = device, rank, size  #: constructor argument
        self._own = join(size, device)
        self.layout = Layout(rank, size)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks: ``[N]`` or a scalar -> same shape, float64, on the CPU."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """Return the maximum over all ranks: ``[N]`` or a scalar -> same shape, float64, on the CPU."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def most(self, count: int) -> int:
        """Return the largest ``count`` over all ranks."""
        return int(self.largest(torch.tensor(count)))

    def texts(self, mine: object) -> list:
        """Gather a plain value from each rank, sent as JSON; return the values by rank."""
        said = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        length = self.most(len(said))
        padded = torch.full((length,), 32, dtype=torch.uint8)  # spaces: JSON ends before them
        padded[: len(said)] = said
        padded = padded.to(self.device)
        every = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(every, padded)
        return [json.loads(bytes(one.cpu().tolist())) for one in every]

    def share(self, error: Exception | None, what: str, kind: type[Exception] = OSError) -> None:
        """Raise on every rank if ``error`` is set on any rank, so that no rank waits for a failed one. Collective.

        Args:
            error: this rank's error, or None.
            what: the work that failed, for messages.
            kind: class of the error on the other ranks.

        Raises:
            Exception: this rank's error, or one of class ``kind`` that names the failed rank.
        """
        problems = self.texts(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise kind(f"{what} failed on rank {rank}: {problem}")

    @property
    def described(self) -> dict[str, int]:
        """Number of ranks, and of ranks that get the same data, as written into a checkpoint."""
        return {"ranks": self.size, "ranks_per_slice": self.size // self.layout.dp_size}

    def close(self) -> None:
        """Destroy the group created here after its last user; a runtime's group stays."""
        if self._own:
            self._own = False
            _OWN_GROUP["users"] -= 1
            # vLLM in this process destroys the group at its end
            if not _OWN_GROUP["users"] and dist.is_initialized():
                dist.destroy_process_group()

    def _reduced(self, values: Tensor, kind: dist.ReduceOp.RedOpType) -> Tensor:
        sent = values.to(device=self.device, dtype=torch.float64)
        dist.all_reduce(sent, kind)
        return sent.cpu()


def join(size: int, device: torch.device) -> bool:
    """Ensure that a process group exists; return whether the one for a single process created here is used.

    Raises:
        EnvironmentProblem: there are several ranks without a group, or the group has another size.
    """
    if dist.is_initialized() and not _OWN_GROUP["users"]:
        if dist.get_world_size() != size:
            raise EnvironmentProblem(
                f"This worker expects {size} ranks, but its process group has {dist.get_world_size()}. "
                "A runtime joins all ranks of a role in one group."
            )
        return False
    if size > 1:
        raise EnvironmentProblem(
            f"There should be {size} ranks, and they have not been joined (torch.distributed is not initialised). "
            'Choose a runtime that starts several ranks: [runtime] backend = "torchrun".'
        )
    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    _OWN_GROUP["users"] += 1
    return True


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


def gather_last(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather ``[..., D]`` of every rank into ``[..., ranks * D]``; not differentiable."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
