"""Time limits of single requests."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_core.types import Request


class Deadlines:
    """When requests with ``Sampling.timeout_s`` must be over, counted from when they are queued."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}  # by id, on the monotonic clock

    def begin(self, requests: Iterable[Request]) -> None:
        """These are queued now."""
        now = time.monotonic()
        self._ends |= {r.id: now + r.sampling.timeout_s for r in requests if r.sampling.timeout_s > 0}

    def end(self, ids: Iterable[str]) -> None:
        """These are over, or nobody waits for them."""
        for id in ids:
            self._ends.pop(id, None)

    def missed(self) -> list[str]:
        """Ids whose time is up."""
        if not self._ends:
            return []
        now = time.monotonic()
        return [id for id, end in self._ends.items() if now >= end]
