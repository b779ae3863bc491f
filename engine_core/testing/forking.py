"""Workers as forks of one process that has imported what most of them need: they start in milliseconds, not in seconds.

Asked for by ``ENGINE_TEST_FORK=1``, where a fork is (Linux); without it every worker is a fresh interpreter. The process is
started with the first worker, makes no tensor and starts no thread, and ends with the one that asked for it. A worker whose
suite has an environment of its own (``Suite.env``) or an accelerator is a fresh interpreter in any case: libraries read
variables when they are imported, and a device is not shared over a fork. The others have the variables of the moment, but
for what the libraries above had read before.

consumes: orders with three descriptors (stdin, stdout, stderr) and a pipe; waits for: the next one, or the end of a fork;
unblocked by: the socket, SIGCHLD; produces: the pid of each, and its exit status in its pipe.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

VARIABLE = "ENGINE_TEST_FORK"
IMPORTED = (
    "torch.distributed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "engine_core.testing.reward_bench",
    "engine_core.testing.rollout_bench",
    "engine_core.testing.train_bench",
    "engine_core.testing.transport_bench",
    "engine_core.testing.worker",
)
STATUS = struct.Struct("i")  # of ``os.waitstatus_to_exitcode``: negative for a signal
MOST_BYTES = 1 << 20  # of an order: an environment


def wanted() -> bool:
    """Whether ``ENGINE_TEST_FORK`` asks for forks, and there are such."""
    return os.environ.get(VARIABLE, "") not in ("", "0") and sys.platform == "linux"


class Forked:
    """A fork: as much of ``subprocess.Popen`` as a launcher needs.

    Args:
        pid: of the process, which leads a process group.
        requests: a pipe to its stdin.
        replies: of its stdout.
        status: gives its exit status when it has ended.
    """

    def __init__(self, pid: int, requests: int, replies: int, status: int) -> None:
        self.pid, self._status = pid, status
        self.returncode: int | None = None
        self.stdin, self.stdout = (
            os.fdopen(requests, "wb", buffering=0),
            os.fdopen(replies, "rb", buffering=0),
        )

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status.

        Raises:
            subprocess.TimeoutExpired: it runs on after so many seconds.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
            told = os.read(self._status, STATUS.size)
            os.close(self._status)
            self.returncode = STATUS.unpack(told)[0] if told else -signal.SIGKILL  # its parent is gone
        return self.returncode

    def send_signal(self, number: int) -> None:
        """As ``Popen.send_signal``: nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Nursery:
    """The process that forks, from outside.

    Args:
        env: its environment.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = json.dumps({"path": [entry or "." for entry in sys.path], "descriptor": theirs.fileno()})
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, order],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=dict(env),
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, env: Mapping[str, str], stderr: int) -> Forked:
        """A worker that waits for its order.

        Args:
            env: its environment.
            stderr: descriptor of where it writes.

        Raises:
            OSError: the process that forks is gone.
        """
        stdin, requests = os.pipe()
        replies, stdout = os.pipe()
        status, told = os.pipe()
        try:
            with self._lock:
                order = json.dumps({"cwd": os.getcwd(), "env": dict(env)}).encode()
                socket.send_fds(self._socket, [order], [stdin, stdout, stderr, told])
                if not (pid := self._socket.recv(64)):
                    raise OSError("the process that forks workers is gone")
        except OSError:
            for mine in (requests, replies, status):
                os.close(mine)
            raise
        finally:
            for descriptor in (stdin, stdout, told):
                os.close(descriptor)
        return Forked(int(pid), requests, replies, status)


def nursery(env: Mapping[str, str]) -> Nursery | None:
    """The one of this process, begun with this environment where there is none yet; None where it is gone."""
    made = _MADE.get(os.getpid()) or _MADE.setdefault(os.getpid(), Nursery(env))
    return made if made.alive else None


_MADE: dict[int, Nursery] = {}  # by process: a fork of this one has none


PROGRAM = """
import json, sys
order = json.loads(sys.argv[1])
sys.path[:] = order["path"]
from engine_core.testing.forking import main
main(order["descriptor"])
"""


def main(descriptor: int) -> None:
    """The process that forks: until whoever asked for it is gone."""
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # forks neither copy nor collect what was imported
    with socket.socket(fileno=descriptor) as orders:
        grown = _serve(orders)
    if grown:
        from engine_core.testing.worker import main as work

        _end_as_an_interpreter(work)


def _serve(orders: socket.socket) -> bool:
    """Fork for each order; True in a fork, and False when there are no more orders."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    status: dict[int, int] = {}  # pid -> the pipe that takes its exit status
    while True:
        readable = select.select([orders.fileno(), woken], [], [])[0]
        if woken in readable:
            os.read(woken, 4096)
            _bury(status)
        if orders.fileno() in readable:
            order, descriptors, *_ = socket.recv_fds(orders, MOST_BYTES, 4)
            if not order:
                return False
            *streams, told = descriptors
            pid = os.fork()
            if not pid:
                for each in (woken, wake, told, *status.values()):
                    os.close(each)
                _become(json.loads(order), streams)
                return True
            with contextlib.suppress(PermissionError, ProcessLookupError):  # it was faster, or has ended
                os.setpgid(pid, pid)
            status[pid] = told
            for stream in streams:
                os.close(stream)
            orders.send(str(pid).encode())


def _bury(status: dict[int, int]) -> None:
    """Tell the exit status of each that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            told = status.pop(ended[0])
            with contextlib.suppress(BrokenPipeError):  # nobody asks any more
                os.write(told, STATUS.pack(os.waitstatus_to_exitcode(ended[1])))
            os.close(told)


def _become(order: Mapping[str, Any], streams: list[int]) -> None:
    """In a fork: a process group, signals, streams, an environment and a folder of its own."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])


def _end_as_an_interpreter(call: Callable[[], None]) -> None:
    """Call it and end the process as Python would, but for the half second that clearing torch's modules takes."""
    code = 0
    try:
        call()
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
