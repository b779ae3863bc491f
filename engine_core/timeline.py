"""The timeline of this process: spans of what it does, the newest ``MOST`` of them, always recorded.

A worker process sends its spans with its answers. The part ``timeline`` writes those of a run into its folder.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 50_000
CONTROLLER = "controller"

Span = tuple[str, str, str, float, float]
"""Group and lane of a span, its name, its start and its end in Unix seconds. Spans of a lane ``#ID`` may get any free lane."""

_spans: deque[Span] = deque(maxlen=MOST)
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


def drain() -> list[Span]:
    """Remove and return the recorded spans. Called by one thread of a process."""
    return [_spans.popleft() for _ in range(len(_spans))]
