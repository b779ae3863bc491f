"""Time and threads of a trainer: those of the machine, or those of a simulation.

The controller's threads read the time and wait for each other only through a ``Clock``, so that a simulation can run
the same code in virtual time, one thread at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """The clock and threads of the machine."""

    def now(self) -> float:
        """Return monotonic seconds since an arbitrary moment."""
        return time.perf_counter()

    def condition(self) -> threading.Condition:
        """Return a condition variable for threads of the controller."""
        return threading.Condition()

    def thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        """Return a daemon thread that runs ``work`` once it is started."""
        return threading.Thread(target=work, name=name, daemon=True)
