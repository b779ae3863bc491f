"""Ending a run on a signal without losing work.

The first SIGTERM, SIGUSR1 (what schedulers send ahead of the end) or SIGINT asks the run to stop: inside
a *window*, where nothing is half done, it raises ``Stop`` at once; elsewhere the stop waits for the next
window or ``check``. The second signal ends the process at once.

Left out on purpose: polling a flag at step borders alone. A step may wait minutes for samples or rewards,
and a scheduler's grace is seconds.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

SAVED = 75  # EX_TEMPFAIL: schedulers take it as "run me again"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Terminated(BaseException):
    """SIGTERM ends the process now. Not SystemExit: that is what a plugin raises to end itself, and is caught as its failure."""

    code = 128 + signal.SIGTERM


class Stop(BaseException):
    """A signal asks the run to end; raised where nothing is half done. No error: nothing may handle it as one."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(self.name)

    @property
    def name(self) -> str:
        """What people call it."""
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name

    def ending(self, saved: bool) -> BaseException:
        """What leaves the program: KeyboardInterrupt for Ctrl-C (exit 130), else SystemExit(75), or 143 if nothing was saved."""
        if self.number == signal.SIGINT:
            return KeyboardInterrupt()
        return SystemExit(SAVED if saved else Terminated.code)


class StopSignals:
    """Takes the signals while it is entered, in the main thread; elsewhere it does nothing.

    Example::

        with StopSignals() as signals:
            with signals.window():
                wait_for_samples()  # a signal raises Stop here
            optimizer_step()  # a signal waits
            signals.check()  # and raises Stop here
    """

    def __init__(self) -> None:
        self.requested: int | None = None  # the first signal
        self._open = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @contextmanager
    def window(self) -> Iterator[None]:
        """A part that may be left at any point: the state of the last finished step is untouched by it."""
        before, self._open = self._open, True
        try:
            self.check()
            yield
        finally:
            self._open = before

    @contextmanager
    def shield(self) -> Iterator[None]:
        """A part within a window that must come to its end."""
        before, self._open = self._open, False
        try:
            yield
        finally:
            self._open = before

    def check(self) -> None:
        """Raise ``Stop`` if a signal has come."""
        if self.requested is not None:
            raise Stop(self.requested)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:  # the second one: now
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated
        self.requested = number
        if self._open:
            raise Stop(number)
