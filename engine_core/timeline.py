"""Time: the clock and threads of a trainer, and the timeline of this process.

The timeline has spans of what the process does, the newest ``MOST`` of them, and is always recorded. A worker process
sends its spans with its answers. The part ``timeline`` writes those of a run into its folder.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST = 50_000
CONTROLLER = "controller"

Span = tuple[str, str, str, float, float]
"""Group and lane of a span, its name, its start and its end in Unix seconds. Spans of a lane ``#ID`` may get any free lane."""

_spans: deque[Span] = deque(maxlen=MOST)
_counts: list[list[int]] = []
"""What the loops of a phase have done, outer ones first: done, total."""
_ZERO = time.time() - time.perf_counter()


def now() -> float:
    """Return Unix seconds of a clock that is never set back."""
    return _ZERO + time.perf_counter()


def add(group: str, lane: str, name: str, start: float, end: float | None = None) -> None:
    """Record a span that ends now, or at ``end``."""
    _spans.append((group, lane, name, start, now() if end is None else end))


@contextmanager
def span(name: str, group: str = CONTROLLER, lane: str = "run") -> Iterator[None]:
    """Record the time of a context; by default it is a part of the controller's step."""
    start = now()
    try:
        yield
    finally:
        add(group, lane, name, start)


@contextmanager
def counting(total: int) -> Iterator[Callable[[int], None]]:
    """Show in the live display how much of ``total`` a loop has done; the context is a function that adds to it."""
    count = [0, total]

    def add(done: int) -> None:
        count[0] += done

    _counts.append(count)
    try:
        yield add
    finally:
        _counts[:] = [other for other in _counts if other is not count]


def counts() -> str:
    """Return the counts of the present phase as text, outer loops first: ``" 2/4 3/8"``; "" without one."""
    return "".join(f" {done}/{total}" for done, total in _counts)


def drain() -> list[Span]:
    """Remove and return the recorded spans. Called by one thread of a process."""
    if len(_spans) == MOST:
        _warn()
    return [_spans.popleft() for _ in range(len(_spans))]


@functools.cache  # once in a process
def _warn() -> None:
    logging.getLogger("engine").warning("The timeline lacks spans: it keeps the newest %d of a step.", MOST)


class Clock:
    """The clock and threads of the machine.

    The controller's threads read the time and wait for each other only through a ``Clock``, so that a simulation can
    run the same code in virtual time, one thread at a time.
    """

    def now(self) -> float:
        """Return monotonic seconds since an arbitrary moment."""
        return time.perf_counter()

    def condition(self) -> threading.Condition:
        """Return a condition variable for threads of the controller."""
        return threading.Condition()

    def thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        """Return a daemon thread that runs ``work`` once it is started."""
        return threading.Thread(target=work, name=name, daemon=True)
