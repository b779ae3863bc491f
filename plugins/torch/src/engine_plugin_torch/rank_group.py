"""The ranks of one engine: their small messages and their process group.

The runtime creates the process group. A run of one process gets a group without a socket here, so that one
rank runs the same code as several.
"""

from __future__ import annotations

import json

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
        self.device, self.rank, self.size = device, rank, size
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
            if not _OWN_GROUP["users"]:
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
