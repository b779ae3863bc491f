"""What the stand-ins for ``subprocess.Popen`` that fork share. It imports nothing heavy."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any


class Forked:
    """A forked process with the part of ``subprocess.Popen``'s interface that ``ChildProcess`` and tests need.

    Args:
        process: has ``pid``, ``exitcode``, ``kill`` and ``close``, as a process of ``multiprocessing``.
        output: descriptor of a pipe from its stdout.
    """

    def __init__(self, process: Any, output: int) -> None:
        self.pid: int = process.pid
        self.returncode: int | None = None
        self.stdout = os.fdopen(output, "rb", buffering=0)
        self._process, self._lock = process, threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        with self._lock:
            if self.returncode is None and (code := self._process.exitcode) is not None:
                self.returncode = code
                atexit.unregister(self._process.kill)
                self._process.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process, as ``Popen.wait`` does."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal; do nothing if the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process; do nothing if it has ended."""
        self.send_signal(signal.SIGKILL)


def become(passed: Sequence[Connection], numbers: Sequence[int], env: Mapping[str, str], folder: str) -> None:
    """Give a fork descriptors (``passed`` as ``numbers``, and stderr as stdout), environment and folder of its command."""
    high = [os.dup2(each.fileno(), 500 + index) for index, each in enumerate(passed)]  # no other's number
    for each in passed:
        each.close()
    for number, each in zip(numbers, high, strict=True):
        os.dup2(each, number)
        os.close(each)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
