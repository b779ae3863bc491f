"""The cores of a machine, shared among processes that compute at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLE = "OMP_NUM_THREADS"


@contextmanager
def shared_cores(processes: int) -> Iterator[None]:
    """Give this process an even share of its threads; processes that it starts meanwhile get the same number.

    With a thread for each core in each process, the threads of an operation wait for cores: two processes on two cores
    took 14 s for a step that takes 1.5 s. Nothing changes where the environment sets the threads, or on an accelerator.

    Args:
        processes: that compute at the same time, this one included.
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
