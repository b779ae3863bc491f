"""The profile of a process during a step: a trace of torch's profiler, and the accelerator's memory."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import set_checkpoint_early_stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_ALLOCATIONS = 100_000


@contextmanager
def profiled(folder: Path, name: str) -> Iterator[None]:
    """Profile this thread and its kernels during the context, also one that fails.

    Args:
        folder: the folder to write into; made if it does not exist.
        name: beginning of the files: ``NAME.json.gz`` for trace viewers and, with CUDA, ``NAME.memory.pickle``, a snapshot
            for pytorch.org/memory_viz, with the last ``MOST_ALLOCATIONS`` allocations.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with ExitStack() as stack:
        if cuda:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
            stack.callback(torch.cuda.memory._record_memory_history, enabled=None)
            stack.callback(torch.cuda.memory._dump_snapshot, str(folder / f"{name}.memory.pickle"))
            # the recording loses the exception that ends the recomputation of a compiled function early (pytorch#179536)
            stack.enter_context(set_checkpoint_early_stop(False))
        trace = profile(activities=activities)
        trace.start()
        stack.callback(trace.export_chrome_trace, str(folder / f"{name}.json.gz"))
        stack.callback(trace.stop)
        yield
