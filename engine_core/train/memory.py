"""The memory of the run's own process: what to say of a step that had none, and what is not looked through for more."""

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
    """Have this process use what it frees again, up to ``KEPT`` bytes of it, for the rest of its life.

    The columns of a step's batch are tens of MB each; glibc gives such back to the kernel when they are freed, and the next
    step has them page by page, each cleared first. Does nothing with another C library, or where the environment says
    how memory is handed out. Meant for a process that holds no model: what one frees may be needed by others.
    """
    if any(name in os.environ for name in _SET_BY_USER):
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):  # none of glibc's
        mallopt = ctypes.CDLL(None).mallopt
        # without the first, the second would end what glibc learns by itself, and give back yet more
        if mallopt(_MMAP_THRESHOLD, LARGE) or mallopt(_MMAP_THRESHOLD, LARGE_BEFORE):
            mallopt(_TRIM_THRESHOLD, KEPT)


@contextmanager
def frozen_gc(now: Callable[[], float]) -> Iterator[Callable[[], None]]:
    """Within it Python's garbage collector leaves out what is there now, and looks between steps for what is garbage.

    A program with torch and transformers has many objects that stay until its end; looking through them again for
    each few thousand rollouts was a fifth of what the controller computes, and looking through the rollouts of a step in the
    midst of it, again and again, a tenth. Where somebody has frozen objects before, nothing is done: thawing would
    undo theirs. A program that has set how often is left with it, where that is rarer.

    Args:
        now: the clock of the run, in seconds.

    Yields:
        What is to be called at the end of each step.
    """
    if gc.get_freeze_count():
        yield lambda: None
        return
    gc.collect()
    gc.freeze()
    young, *older = before = gc.get_threshold()
    gc.set_threshold(max(young, YOUNG) if young else 0, *older)  # 0: it is off
    try:
        yield _GcPacer(now) if young else lambda: None
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class _GcPacer:
    """Frees what is garbage when it is called: each time, unless that would take more of the time than ``SHARE``.

    Garbage may hold an accelerator's memory, of which Python knows nothing. A run of thousands of workers has objects for a
    second's look; there it waits for some steps.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._next = now, now()

    def __call__(self) -> None:
        if not gc.isenabled() or self._now() < self._next:  # somebody has switched it off, or it is too soon
            return
        began = time.perf_counter()
        gc.collect()
        self._next = self._now() + (time.perf_counter() - began) / SHARE


@contextmanager
def out_of_memory_explained(run: TrainingRun) -> Iterator[None]:
    """Within it an accelerator or host that has no memory left is a problem of the machine, told with what takes less.

    Raises:
        EnvironmentProblem: in place of an error of memory.
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
            f"Lower {budgets}; where one sequence is too long for the device, lower {longest}; "
            "recompute activations or offload, as the table of the backend offers it; or use more processes. `engine resume RUN --set KEY=VALUE` goes on from the newest checkpoint."
        ) from error
