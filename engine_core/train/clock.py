"""Time and threads, as a trainer uses them: those of the machine, or those of a simulation.

The controller's threads read the time and wait for each other through a ``Clock`` alone, so that a simulation can run the same code in
virtual time, one thread at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """The machine's."""

    def now(self) -> float:
        """Seconds since some moment; never less than before."""
        return time.perf_counter()

    def condition(self) -> threading.Condition:
        """What threads of the controller lock, and wait for each other with."""
        return threading.Condition()

    def thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        """One that carries out ``work`` once it is started, and ends with the process."""
        return threading.Thread(target=work, name=name, daemon=True)
