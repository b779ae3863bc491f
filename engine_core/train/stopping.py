"""Stopping a run on a signal without losing work, and the hint that says how it continues.

The first SIGTERM, SIGUSR1 (which schedulers send before they end a job), SIGHUP (the terminal is gone) or SIGINT asks
the run to stop. Inside a *window*, where nothing is half done, the signal raises ``Stop`` at once; elsewhere the stop
waits for the next window or ``check``. A second signal ends the process at once, unless it follows within ``ONE_STOP``
seconds: ``timeout`` and job managers signal a process and then its group, so one stop arrives twice.

Left out on purpose: only polling a flag between steps. A step may wait minutes for samples or rewards,
and a scheduler's grace period is seconds.
"""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from engine_core.launch import launched
from engine_core.runs.checkpoint import Checkpoints

if TYPE_CHECKING:
    from engine_core.config.models import CheckpointConfig
    from engine_core.runs.tracking import RunFolder

SAVED = 75  # EX_TEMPFAIL: schedulers take it as "run me again"
ONE_STOP = 0.2  # seconds
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class Terminated(BaseException):
    """A SIGTERM that ends the process now. Not a SystemExit, which is caught as a plugin's failure."""

    code = 128 + signal.SIGTERM


class Stop(BaseException):
    """A signal that asks the run to end, raised where nothing is half done. Not an ``Exception``, so no handler takes it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(self.name)

    @property
    def name(self) -> str:
        """Name of the signal in messages: ``Ctrl-C`` for SIGINT."""
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name

    def ending(self, saved: bool) -> BaseException:
        """Return the exception that ends the program.

        KeyboardInterrupt for Ctrl-C (exit 130), else SystemExit(75), or SystemExit(143) if nothing was saved.
        """
        if self.number == signal.SIGINT:
            return KeyboardInterrupt()
        return SystemExit(SAVED if saved else Terminated.code)


class StopSignals:
    """A context that handles the stop signals in the main thread; in other threads it does nothing.

    Example::

        with StopSignals() as signals:
            with signals.window():
                wait_for_samples()  # a signal raises Stop here
            optimizer_step()  # a signal waits
            signals.check()  # and raises Stop here
    """

    def __init__(self) -> None:
        self.requested: int | None = None  # the first signal
        self._requested_at = 0.0
        self._open = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            taken = [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]
            self._before = {number: signal.signal(number, self._receive) for number in taken}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @contextmanager
    def window(self) -> Iterator[None]:
        """Mark a block that ``Stop`` may interrupt at any point, since it does not change the last finished step."""
        before, self._open = self._open, True
        try:
            self.check()
            yield
        finally:
            self._open = before

    def check(self) -> None:
        """Raise ``Stop`` if a signal was received."""
        if self.requested is not None:
            raise Stop(self.requested)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            if time.monotonic() - self._requested_at < ONE_STOP:
                return
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated
        self.requested, self._requested_at = number, time.monotonic()
        if self._open:
            raise Stop(number)


def resume_hint(folder: RunFolder, config: CheckpointConfig) -> str:
    """Return the advice to log after a run has ended early: usually the command that resumes it.

    Args:
        folder: the run folder.
        config: ``[checkpoint]``.
    """
    command = resume_command(folder.path)
    try:
        steps = Checkpoints(folder.checkpoints).steps()
    except OSError:
        return f"Its checkpoints could not be read. Once they can: {command}"
    if steps:
        return f"The newest checkpoint is of step {steps[-1]}. Resume: {command}"
    often = config.every_steps or config.every_minutes
    return "No checkpoint was saved" + ("." if often else ": set checkpoint.every_steps to keep work.")


def resume_command(folder: Path) -> str:
    """Return the shell command that resumes the run of ``folder``."""
    command = f"engine resume {shlex.quote(str(folder))}"
    return command if not launched() else f"{command}, on every node under torchrun as it was started"
