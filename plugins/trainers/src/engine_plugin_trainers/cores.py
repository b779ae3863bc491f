"""CPU cores shared among processes that compute at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLE = "OMP_NUM_THREADS"


@contextmanager
def shared_cores(processes: int) -> Iterator[None]:
    """Limit this process to an even share of its threads; child processes started meanwhile get the same number.

    If each process has one thread per core, threads wait for cores: two processes on two cores took 14 s for a step
    that takes 1.5 s. The limit is not applied if the environment sets the number of threads, or with an accelerator.

    Args:
        processes: number of processes that compute at the same time, this one included.
    """
    if VARIABLE in os.environ or torch.accelerator.is_available():
        yield
        return
    before = torch.get_num_threads()
    share = max(before // processes, 1)
    os.environ[VARIABLE] = str(share)
    torch.set_num_threads(share)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        torch.set_num_threads(before)
