"""The ranks of one engine: what they tell each other in small messages, and the process group that they talk in.

The process group is the one that the runtime made. A run of one process gets a group of its own that
opens no socket, so that one rank goes the same way as many.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import Tensor

from engine_core.contracts.engines import Layout
from engine_core.errors import EnvironmentProblem

_OWN_GROUP = {"users": 0}  # engines that use a group of one process that was made here


class RankGroup:
    """All ranks of one role.

    Args:
        rank: this one.
        size: how many there are.
        device: of this rank, with its index.

    Raises:
        EnvironmentProblem: they have not been joined.

    Attributes:
        layout: place of this rank among those that get data.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.device, self.rank, self.size = device, rank, size
        self._own = join(size, device)
        self.layout = Layout(rank, size)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks, float64, on the CPU."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """The largest over all ranks, float64, on the CPU."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def most(self, count: int) -> int:
        """The largest of a number that each rank has."""
        return int(self.largest(torch.tensor(count)))

    def texts(self, mine: object) -> list:
        """What each rank says, by rank: plain values, sent as JSON."""
        said = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        length = self.most(len(said))
        padded = torch.full((length,), 32, dtype=torch.uint8)  # spaces: JSON ends before them
        padded[: len(said)] = said
        padded = padded.to(self.device)
        every = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(every, padded)
        return [json.loads(bytes(one.cpu().tolist())) for one in every]

    def share(self, error: Exception | None, what: str, kind: type[Exception] = OSError) -> None:
        """Every rank learns whether one failed, so that none waits for it.

        Raises:
            Exception: this rank's own error, or one that names the rank that failed.
        """
        told = self.texts(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, problem in enumerate(told):
            if problem is not None:
                raise kind(f"{what} failed on rank {rank}: {problem}")

    @property
    def described(self) -> dict[str, int]:
        """How many ranks there are, and how many of them are given the same data: what a checkpoint says of who wrote it."""
        return {"ranks": self.size, "ranks_per_slice": self.size // self.layout.dp_size}

    def close(self) -> None:
        """Leave the group that was made here; that of a runtime stays."""
        if self._own:
            self._own = False
            _OWN_GROUP["users"] -= 1
            if not _OWN_GROUP["users"]:
                dist.destroy_process_group()

    def _reduced(self, values: Tensor, kind: dist.ReduceOp.RedOpType) -> Tensor:
        sent = values.to(device=self.device, dtype=torch.float64)
        dist.all_reduce(sent, kind)
        return sent.cpu()


def join(size: int, device: torch.device) -> bool:
    """Make sure of a process group; True where it was made here, for one process.

    Raises:
        EnvironmentProblem: there should be several ranks and no runtime has joined them.
    """
    if dist.is_initialized() and not _OWN_GROUP["users"]:
        if dist.get_world_size() != size:
            raise EnvironmentProblem(
                f"This worker was told of {size} ranks, but its process group has {dist.get_world_size()}. "
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
