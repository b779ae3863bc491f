"""A stand-in for ``subprocess.Popen`` that forks the workers of rewards and of rows: their imports take most of a second.

They are forks of one process that has imported what each of them imports, which is neither torch nor transformers. It starts
with the first worker and ends with the process that started it. Other commands, and those of another interpreter, start as usual.
The forks import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from engine_plugin_processes import child
from engine_plugin_processes.child import python_command

EXECUTABLE = sys.executable
ENTRIES = ("engine_plugin_rewards.worker_pool.worker:main", "engine_plugin_processes.row_workers:serve")
COMMANDS = {tuple(python_command(entry)[:4]): entry for entry in ENTRIES}
IMPORTED = (
    "engine_core.builtin",
    "engine_core.plugins.plugin_set",
    "engine_core.rewards.signatures",
    "engine_plugin_rewards.plugin",
    "engine_plugin_rewards.worker_pool.worker",
    "engine_plugin_processes.row_workers",
)

SERVER = forkserver.ForkServer()  # not multiprocessing's own, which imports torch for the workers of pools
SERVER.set_forkserver_preload(list(IMPORTED))
STARTING = threading.Lock()


def popen(command: Sequence[str], **options: Any) -> Any:
    """Start a command; a worker of rewards or of rows is forked."""
    entry = COMMANDS.get(tuple(command[:4]))
    if entry is None:
        return subprocess.Popen(command, **options)
    reads, writes = os.pipe()
    ready, begun = os.pipe()
    numbers = [1, *options["pass_fds"]]
    passed = [Connection(writes), *(Connection(os.dup(number)) for number in numbers[1:])]
    given = Connection(begun, readable=False)
    env = dict(options.get("env") or os.environ)
    process = multiprocessing.get_context("forkserver").Process(
        target=work, args=(entry, list(command[4:]), env, os.getcwd(), numbers, passed, given)
    )
    own = SimpleNamespace(
        connect_to_new_process=SERVER.connect_to_new_process, read_signed=forkserver.read_signed
    )
    with STARTING, patch.object(popen_forkserver, "forkserver", own):
        process.start()
    for each in (*passed, given):
        each.close()
    os.read(ready, 1)  # until it leads its session, which may be killed at once
    os.close(ready)
    atexit.register(process.kill)  # otherwise the end of this process would wait for it
    return Child(process, reads)


class Child:
    """A forked worker with the part of ``subprocess.Popen``'s interface that ``ChildProcess`` and tests need."""

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


class Subprocess:
    """The module ``subprocess`` with another ``Popen``."""

    Popen = staticmethod(popen)

    def __getattr__(self, name: str) -> object:
        return getattr(subprocess, name)


@contextlib.contextmanager
def forked(rank: int, world_size: int) -> Iterator[None]:
    """Fork these workers in a worker of the kit, whose context this is, where ``ENGINE_TEST_FORK`` is set.

    The case that kills a worker starts fresh ones: it looks for them among the children of its process.
    """
    from engine_plugin_testing import forking, reward_cases  # lazily imported: the forks import this module

    killing = reward_cases.a_worker_that_is_lost_is_replaced

    def with_fresh_ones(bench: Any) -> None:
        with patch.object(child, "subprocess", subprocess):
            killing(bench)

    with contextlib.ExitStack() as stack:
        if forking.wanted():
            stack.enter_context(patch.object(child, "subprocess", Subprocess()))
            stack.enter_context(patch.object(reward_cases, killing.__name__, with_fresh_ones))
        yield


def work(
    entry: str,
    arguments: list[str],
    env: Mapping[str, str],
    folder: str,
    numbers: Sequence[int],
    passed: Sequence[Connection],
    begun: Connection,
) -> None:
    """Run a worker in the fork: with the session, descriptors, environment, folder and path that its command asks for."""
    os.setsid()
    begun.close()
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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-c", *arguments]
    sys.path[:] = arguments[1:]
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)(int(arguments[0]))
