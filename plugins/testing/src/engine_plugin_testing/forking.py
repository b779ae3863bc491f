"""Workers as forks of one process that has imported what most of them need: they start in milliseconds, not seconds.

Requested by ``ENGINE_TEST_FORK=1`` on Linux; otherwise every worker is a fresh interpreter. The forking process is
``multiprocessing``'s fork server: it starts with the first worker, makes no tensor and ends with the process that
started it. A worker whose suite sets environment variables (``Suite.env``) or has an accelerator is always a fresh
interpreter: libraries read variables when they are imported, and a device is not shared over a fork. The other workers
have the present variables, except for what the libraries had read before.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from unittest.mock import patch

VARIABLE = "ENGINE_TEST_FORK"
IMPORTED = (
    "peft",  # skipped where it is not installed
    "torch.distributed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "engine_plugin_testing.reward_bench",
    "engine_plugin_testing.rollout_bench",
    "engine_plugin_testing.train_bench",
    "engine_plugin_testing.transport_bench",
    "engine_plugin_testing.worker",
)


def wanted() -> bool:
    """Return whether ``ENGINE_TEST_FORK`` requests forks and the platform supports them."""
    return os.environ.get(VARIABLE, "") not in ("", "0") and sys.platform == "linux"


class Forked:
    """A forked process with the part of ``subprocess.Popen``'s interface that a launcher needs.

    Args:
        process: a process that has been started.
        requests: descriptor of a pipe to its stdin.
        replies: descriptor of a pipe from its stdout.
    """

    def __init__(self, process: BaseProcess, requests: int, replies: int) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid
        self.returncode: int | None = None
        self.stdin = os.fdopen(requests, "wb", buffering=0)
        self.stdout = os.fdopen(replies, "rb", buffering=0)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        if self.returncode is None and (code := self._process.exitcode) is not None:
            self.returncode = code
            atexit.unregister(self._process.kill)
            self._process.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit status.

        Raises:
            subprocess.TimeoutExpired: the process still runs after ``timeout`` seconds.
        """
        if self.returncode is None:
            self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, as ``Popen.send_signal`` does; do nothing if the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)


def fork(env: Mapping[str, str], stderr: int) -> Forked:
    """Fork a worker that waits for its order.

    Args:
        env: its environment.
        stderr: descriptor for its stderr.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    stdin, requests = multiprocessing.Pipe(duplex=False)
    replies, stdout = multiprocessing.Pipe(duplex=False)
    with stdin, requests, replies, stdout, Connection(os.dup(stderr), readable=False) as errors:
        process = context.Process(target=_work, args=((stdin, stdout, errors), dict(env), os.getcwd()))
        with patch.dict(os.environ, env):  # the libraries read the environment in the fork server
            process.start()
        atexit.register(process.kill)  # otherwise the end of this process would wait for it
        return Forked(process, os.dup(requests.fileno()), os.dup(replies.fileno()))


def _work(streams: tuple[Connection, ...], env: Mapping[str, str], folder: str) -> None:
    """Run a worker in the fork, with a separate process group, streams, environment and folder."""
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    gc.freeze()  # what was imported before the fork is never collected, so no collection looks at it
    from engine_plugin_testing.worker import main

    main()
