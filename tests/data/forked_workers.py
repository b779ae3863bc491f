"""Worker processes as forks, for tests that start many: each saves the seconds of processor time that imports take.

The kit's fork server, which has imported torch and transformers, forks one process here. That one forks a worker for
each request and leaves it to the process of the tests as its child, so that ``subprocess.Popen`` can wait for it.
Other commands, and workers of another interpreter or with another ``OMP_NUM_THREADS``, start as usual.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from engine_plugin_processes.worker_process import MODULE
from engine_plugin_testing import forking

THREADS = "OMP_NUM_THREADS"  # read when torch is imported
SUBREAPER = 36  # of prctl: orphans among the descendants become children
POPEN = subprocess.Popen
IMPORTED = ("engine_plugin_processes.worker", "engine_plugin_torch.engine", "engine_plugin_hf_rollout.engine")


class ForkedWorkers:
    """A stand-in for ``subprocess.Popen`` that forks workers. Make one in each process that starts some."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(forking.IMPORTED))
        self._ours, theirs = socket.socketpair()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        self._threads = os.environ.get(THREADS)

    def __call__(self, command: Any, **options: Any) -> subprocess.Popen[bytes]:
        env = options.get("env") or dict(os.environ)
        worker = list(command[-5:-1]) == [sys.executable, "-P", "-m", MODULE]
        if not worker or env.get(THREADS) != self._threads:
            return POPEN(command, **options)
        return Forked(self, command, env, options["pass_fds"])

    def fork(self, command: Any, env: dict[str, str], output: int, passed: list[int]) -> int:
        """Fork a worker; return its process id."""
        request = {"command": command, "env": env, "folder": os.getcwd(), "passed": passed}
        with self._lock:
            _adopt(True)
            try:
                socket.send_fds(self._ours, [b"+"], [output, *passed])
                with self._ours.makefile("rw") as line:
                    print(json.dumps(request), file=line, flush=True)
                    return int(line.readline())
            finally:
                _adopt(False)

    def close(self) -> None:
        """End the process that forks; the workers stay."""
        self._ours.close()
        self._process.join()


class Forked(subprocess.Popen):
    """A forked worker: what ``Popen`` does after the start."""

    def __init__(self, workers: ForkedWorkers, command: Any, env: dict[str, str], passed: Any) -> None:
        self.args, self.returncode, self._child_created = command, None, True
        self._waitpid_lock = threading.Lock()
        self.stdin = self.stderr = None
        reads, writes = os.pipe()
        self.stdout = os.fdopen(reads, "rb")
        try:
            self.pid = workers.fork(list(command), env, writes, list(passed))
        finally:
            os.close(writes)


def serve(requests: socket.socket) -> None:
    """Fork a worker for each request until the socket closes."""
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    while True:
        _, descriptors, _, _ = socket.recv_fds(requests, 1, 16)
        if not descriptors:
            return
        with requests.makefile("rw") as line:
            request = json.loads(line.readline())
            reads, writes = os.pipe()
            if (between := os.fork()) == 0:
                if pid := os.fork():  # ends at once, which makes the worker a child of the tests' process
                    os.write(writes, str(pid).encode())
                    os._exit(0)
                work(request, descriptors)
            for descriptor in (*descriptors, writes):
                os.close(descriptor)
            os.waitpid(between, 0)
            print(os.read(reads, 32).decode(), file=line, flush=True)
            os.close(reads)


def work(request: dict[str, Any], descriptors: list[int]) -> None:
    """Become the worker that was asked for, with its keeper if it has one."""
    from engine_plugin_processes import keeper, worker

    os.setsid()
    numbers = [1, *request["passed"]]
    high = [os.dup2(each, 500 + index) for index, each in enumerate(descriptors)]  # out of each other's way
    for number, each in zip(numbers, high, strict=True):
        os.dup2(each, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in numbers:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(number)
    os.dup2(1, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.path[:0] = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if len(command := request["command"]) > 5:
        life = int(command[-6])
        if os.fork() == 0:
            keeper.keep(life)
        os.close(life)
    sys.argv = [worker.__file__, command[-1]]
    try:
        worker.main()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)


def _adopt(orphans: bool) -> None:
    ctypes.CDLL(None).prctl(SUBREAPER, int(orphans), 0, 0, 0)
