"""Reuse of host memory by tensors on the CPU."""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # options of mallopt, from malloc.h
LARGEST = 32 << 20  # glibc takes no larger threshold


def keep_freed_memory() -> None:
    """Have glibc keep the memory of freed tensors up to 32 MiB for later tensors of this process.

    By default glibc returns it to the system, and each page of the next tensor costs a page fault. A step of training
    allocates the same sizes again and again: of 70,000 to 120,000 faults a step about 20 remain, and 13% of its CPU time
    goes (``benchmarks/trl``). Nothing is changed without glibc, or if the environment sets a threshold
    (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``).
    """
    chosen = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & set(os.environ)
    if sys.platform != "linux" or chosen:
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(MMAP_THRESHOLD, LARGEST)
        mallopt(TRIM_THRESHOLD, -1)  # never
