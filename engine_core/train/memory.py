"""Memory of the controller process: reuse of freed memory, garbage collection pacing, advice when memory runs out."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from engine_core.errors import EnvironmentProblem

if TYPE_CHECKING:
    from engine_core.train.run import TrainingRun


YOUNG = 500_000
"""New objects until Python looks for garbage among them by itself: rollouts are none, however many."""
SHARE = 0.001
"""Of a run's time, what looking for garbage between steps may take."""


LARGE, KEPT = 128 << 20, 512 << 20
"""Bytes: of a block that is taken from what was freed, and that may be free without going back to the kernel."""
LARGE_BEFORE = 32 << 20  # the most that glibc takes for the first, before 2.35
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's malloc.h
_SET_BY_USER = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> None:
    """Make this process reuse freed memory, up to ``KEPT`` bytes, for the rest of its life.

    The columns of a step's batch are tens of MB each. By default glibc returns such blocks to the kernel when they are
    freed, and the next step gets them back page by page, each cleared first. This does nothing with another C library,
    or if an environment variable sets these limits. It is meant for a process that holds no model, because other
    processes may need the memory that a model frees.
    """
    if any(name in os.environ for name in _SET_BY_USER):
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):  # none of glibc's
        mallopt = ctypes.CDLL(None).mallopt
        # setting only the second would turn off glibc's adaptive thresholds, and more memory would be given back
        if mallopt(_MMAP_THRESHOLD, LARGE) or mallopt(_MMAP_THRESHOLD, LARGE_BEFORE):
            mallopt(_TRIM_THRESHOLD, KEPT)


@contextmanager
def frozen_gc(now: Callable[[], float]) -> Iterator[Callable[[], None]]:
    """Exclude the objects that exist now from Python's garbage collection, and collect between steps.

    A program with torch and transformers has many objects that live until its end. Scanning them again for every few
    thousand rollouts took a fifth of the controller's time; scanning the rollouts of a step repeatedly within it took a
    tenth. If the program has frozen objects already, this does nothing, because unfreezing would undo that. A higher
    threshold that the program has set is kept.

    Args:
        now: the clock of the run, in seconds.

    Yields:
        A function to call at the end of each step, which collects garbage.
    """
    if gc.get_freeze_count():
        yield lambda: None
        return
    gc.collect()
    gc.freeze()
    young, *older = before = gc.get_threshold()
    gc.set_threshold(max(young, YOUNG) if young else 0, *older)  # 0: collection is off
    try:
        yield _GcPacer(now) if young else lambda: None
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class _GcPacer:
    """A callable that collects garbage, but skips calls as needed to spend at most ``SHARE`` of the time.

    Garbage may hold an accelerator's memory, which Python does not count. In a run of thousands of workers one
    collection may take a second, so some steps are skipped.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._next = now, now()

    def __call__(self) -> None:
        if not gc.isenabled() or self._now() < self._next:  # switched off, or too soon
            return
        began = time.perf_counter()
        gc.collect()
        self._next = self._now() + (time.perf_counter() - began) / SHARE


@contextmanager
def out_of_memory_explained(run: TrainingRun) -> Iterator[None]:
    """Turn an out-of-memory error of an accelerator or host into one that names the settings to lower.

    Raises:
        EnvironmentProblem: raised in place of the out-of-memory error.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        rank = getattr(error.__cause__, "rank", None)
        where = "" if rank is None else f" on rank {rank}"
        trained = [
            name for name, role in run.roles(training=True).items() if role.kind == "train" and role.trainable
        ]
        now = {name: str(run.config_now.role(name).max_tokens_per_rank) for name in trained}
        automatic = "auto; the log says what it came to"
        budgets = " or ".join(
            f"{name}.max_tokens_per_rank (now {automatic if now[name] == 'auto' else now[name]})"
            for name in trained
        )
        longest = (
            "rollout.max_response_tokens or data.max_prompt_tokens" if run.samples else "the limits of [data]"
        )
        raise EnvironmentProblem(
            f"Out of memory{where} in step {run.step_now}: {str(error).partition(chr(10))[0][:200]} "
            f"Lower {budgets}; if one sequence is too long for the device, lower {longest}; recompute activations or "
            "offload, if the backend has the option; or use more processes. Then: `engine resume RUN --set KEY=VALUE`."
        ) from error
