"""The common part of the modules that fork workers in place of ``subprocess.Popen``. It imports nothing heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from engine_plugin_testing import forking


class Forked(forking.Forked):
    """A forked worker that several threads may wait for, as ``ChildProcess`` does.

    Args:
        process: has ``pid``, ``exitcode``, ``kill`` and ``close``, as a process of ``multiprocessing``.
        output: descriptor of a pipe from its stdout.
    """

    def __init__(self, process: Any, output: int) -> None:
        super().__init__(process, os.open(os.devnull, os.O_WRONLY), output)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        with self._lock:
            return super().poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process, as ``Popen.wait`` does."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        """Kill the process; do nothing if it has ended."""
        self.send_signal(signal.SIGKILL)


def become(passed: Sequence[Connection], numbers: Sequence[int], env: Mapping[str, str], folder: str) -> None:
    """Give a fork descriptors (``passed`` as ``numbers``, and stdout as stderr), environment and folder of its command."""
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
