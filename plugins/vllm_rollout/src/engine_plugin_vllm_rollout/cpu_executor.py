"""vLLM's external launcher where the parts of a model are on CPUs.

They exchange through memory of a name that vLLM makes from the address at which the ranks met. Of the external
launcher that is the same for all runs of a machine, so that two would share it, and one that was killed would leave
it to the next.
"""

from __future__ import annotations

import os

import torch
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher


class LauncherOnCPU(ExecutorWithExternalLauncher):
    """The external launcher with a name of this run's own."""

    def _distributed_args(self) -> tuple[str, int, int]:
        _, rank, local_rank = super()._distributed_args()
        number = torch.tensor([int.from_bytes(os.urandom(7), "big")])
        torch.distributed.broadcast(number, 0)
        # the ranks have met: nothing is opened there
        return f"file://engine-{int(number):x}", rank, local_rank
