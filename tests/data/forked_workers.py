"""A stand-in for ``subprocess.Popen`` that forks workers, for tests that start many: an import takes seconds of processor time.

Workers are forks of the kit's fork server, which has imported torch and transformers. Other commands, and workers of
another interpreter or with another ``OMP_NUM_THREADS``, start as usual.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from engine_plugin_processes import keeper, worker
from engine_plugin_processes.worker_process import MODULE
from engine_plugin_testing import forking

POPEN = subprocess.Popen
PATH = list(sys.path)
THREADS = os.environ.get("OMP_NUM_THREADS")  # torch reads it when the fork server imports it


def popen(command: Sequence[str], **options: Any) -> Any:
    """Start a command; a worker with this interpreter and as many threads is forked."""
    env = options.get("env") or os.environ
    ours = list(command[-5:-1]) == [sys.executable, "-P", "-m", MODULE]
    if not ours or env.get("OMP_NUM_THREADS") != THREADS:
        return POPEN(command, **options)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(forking.IMPORTED))
    reads, writes = os.pipe()
    numbers = [1, *options["pass_fds"]]
    passed = [Connection(writes), *(Connection(os.dup(number)) for number in numbers[1:])]
    path = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    process = context.Process(
        target=work, args=(list(command), dict(env), os.getcwd(), path, numbers, passed)
    )
    process.start()
    for each in passed:
        each.close()
    atexit.register(process.kill)  # otherwise the end of this process would wait for it
    return Forked(process, reads)


class Forked(forking.Forked):
    """A forked worker that several threads may wait for."""

    def __init__(self, process: Any, output: int) -> None:
        super().__init__(process, os.open(os.devnull, os.O_WRONLY), output)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            return super().poll()

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
            time.sleep(0.005)
        return code


def work(
    command: Sequence[str],
    env: Mapping[str, str],
    folder: str,
    path: list[str],
    numbers: list[int],
    passed: list[Connection],
) -> None:
    """Run a worker in the fork: with the session, descriptors, environment, folder and keeper that its command asks for."""
    os.setsid()
    high = [
        os.dup2(each.fileno(), 500 + index) for index, each in enumerate(passed)
    ]  # none is another's number
    for each in passed:
        each.close()
    for number, each in zip(numbers, high, strict=True):
        os.dup2(each, number)
        os.close(each)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if len(command) > 5:  # python -I -S keeper.py LIFE, then the command
        life = int(command[-6])
        if os.fork() == 0:
            keeper.keep(life)
        os.close(life)
    sys.argv = [worker.__file__, command[-1]]
    worker.main()
