"""A stand-in for ``subprocess.Popen`` that forks workers, for tests that start many: an import takes seconds of processor time.

Workers are forks of the kit's fork server, or of that of the fault tests. Both have imported torch and transformers.
Other commands, and workers of another interpreter or with another ``OMP_NUM_THREADS``, start as usual.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forked import Forked, become

from engine_plugin_processes import keeper, worker
from engine_plugin_processes.worker_process import MODULE
from engine_plugin_testing import forking

POPEN = subprocess.Popen
PATH = list(sys.path)
THREADS = os.environ.get("OMP_NUM_THREADS")  # torch reads it when the fork server imports it


def popen(command: Sequence[str], *, start: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Start a command; a worker with this interpreter and as many threads is forked, by ``start`` (default: ``fork``)."""
    env = options.get("env") or os.environ
    ours = list(command[-5:-1]) == [sys.executable, "-P", "-m", MODULE]
    if not ours or env.get("OMP_NUM_THREADS") != THREADS:
        return POPEN(command, **options)
    reads, writes = os.pipe()
    path = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    order = {"command": list(command), "env": dict(env), "folder": os.getcwd(), "path": path}
    order["numbers"] = [1, *options["pass_fds"]]
    process = (start or fork)(order, [writes, *options["pass_fds"]])
    os.close(writes)
    return Forked(process, reads)


def fork(order: dict[str, Any], passed: Sequence[int]) -> Any:
    """Fork a worker by the kit's server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(forking.IMPORTED))
    connections = [Connection(os.dup(number)) for number in passed]
    process = context.Process(target=work, kwargs=order | {"passed": connections})
    process.start()
    for each in connections:
        each.close()
    atexit.register(process.kill)  # otherwise the end of this process would wait for it
    return process


class Ordered:
    """A worker forked by the other side of a socket, which answers with its pid and, later, its exit code."""

    def __init__(self, server: socket.socket, order: dict[str, Any], passed: Sequence[int]) -> None:
        reads, writes = os.pipe()
        socket.send_fds(server, [json.dumps(order).encode()], [writes, *passed])
        os.close(writes)
        self._answers = os.fdopen(reads, "rb", buffering=0)
        self.pid = int(self._answers.readline())

    @property
    def exitcode(self) -> int | None:
        """Return the exit code, negative for a signal; None while the worker runs."""
        return int(self._answers.readline()) if select.select([self._answers], [], [], 0)[0] else None

    def kill(self) -> None:
        """Kill the worker."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipe of answers."""
        self._answers.close()


def show(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Make /proc show a command and its environment as this process's, as far as they fit, our variables first."""
    places = list(map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]))
    variables = [f"{name}={value}" for name, value in env.items()]
    variables.sort(key=lambda each: not each.startswith("ENGINE_"))
    for words, start, end in ((command, *places[:2]), (variables, *places[2:])):
        text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


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
    become(passed, numbers, env, folder)
    show(command, env)
    sys.path[:] = path
    if len(command) > 5:  # python -I -S keeper.py LIFE, then the command
        life = int(command[-6])
        if os.fork() == 0:
            keeper.keep(life)
        os.close(life)
    sys.argv = [worker.__file__, command[-1]]
    worker.main()
