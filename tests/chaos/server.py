"""Fork server: ``engine`` commands as real processes without the seconds that imports take.

Everything heavy is imported once; no tensor is made and no thread is started, so a fork is a fresh
process. A request is a JSON line on stdin: ``argv`` (after ``engine``), ``cwd``, ``env`` (whole),
``stdout`` and ``stderr`` (paths), ``prelude`` (a script that the child runs first, or null). Answers
are JSON lines on stdout: ``{"started": pid}``, and ``{"ended": pid, "code": returncode}`` when a child
ends. A child is a session of its own and ends as an interpreter does: by its exit code, by an uncaught
exception or by a signal. With ``ENGINE_TEST_FORK`` the workers that a child starts are forks, too: it orders them over
a socket (``forked_workers.py``).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

DATA = str(Path(__file__).parents[1] / "data")
sys.path.append(DATA)
import forked_workers

sys.path.remove(DATA)
FORKS = forked_workers.forking.wanted()

IMPORTED = (
    "torch",
    "torch.utils.tensorboard",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "engine_core.train.trainer",
    "engine_plugin_trainers.sft",
    "engine_plugin_torch.engine",
    "engine_core.cli.train",
    "engine_core.local.engine_host",
    "engine_core.local.runtime",
    "engine_plugin_tools.plugin",
    "engine_plugin_torch.plugin",
    "engine_plugin_tools.commands.runs",
    "engine_plugin_tools.commands.configs",
    "engine_plugin_tools.commands.models",
    "engine_plugin_hf_rollout.engine",
    "engine_core.data.order",
    "engine_plugin_processes.sampler_process.build",
    "engine_plugin_processes.starting",
    "engine_plugin_processes.torchrun",
    "engine_plugin_processes.transports.choice",
    "engine_plugin_tools.health",
    "engine_plugin_tools.memory_plan",
    "engine_plugin_tools.time_plan",
    "engine_plugin_tools.timeline",
    "numpy.ctypeslib",
    "tokenizers.trainers",
    "torch.distributed",
    "transformers.models.auto.tokenization_auto",
    "pandas",  # which pyarrow imports with the first table
    "pyarrow.parquet",
    "pyarrow.pandas_compat",
    "psutil",
    "rich.live",
)


def serve() -> dict | None:
    """Fork a child for each request; returns its request in the child, and None at the end of stdin."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    ended, notify = os.pipe()
    os.set_blocking(notify, False)
    signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def say(**answer):
        os.write(answers, json.dumps(answer).encode() + b"\n")

    say(ready=True, threads=threading.active_count())
    pending, requests = b"", 0
    orders, children = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    workers: dict[int, int] = {}  # pid -> descriptor of the pipe to the one who ordered it
    while True:
        readable, _, _ = select.select([requests, ended, orders], [], [])
        coming: list[tuple[bytes, list[int]]] = []
        if ended in readable:
            os.read(ended, 4096)
            for pid, code in finished():
                if pid in workers:
                    answer(workers[pid], code)
                    os.close(workers.pop(pid))
                else:
                    say(ended=pid, code=code)
        if orders in readable:
            coming.append(socket.recv_fds(orders, 1 << 18, 16)[:2])
        if requests in readable:
            data = os.read(requests, 1 << 16)
            if not data:
                return None
            *lines, pending = (pending + data).split(b"\n")
            coming += [(line, []) for line in lines]
        for line, passed in coming:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (answers, ended, notify, orders.detach(), *workers.values(), *passed[:1]):
                    os.close(descriptor)
                return json.loads(line) | {"server": children, "passed": passed[1:]}
            if not passed:
                say(started=pid)
                continue
            workers[pid] = passed[0]
            answer(passed[0], pid)
            for descriptor in passed[1:]:
                os.close(descriptor)


def answer(pipe: int, number: int) -> None:
    """Write a line to the one who ordered a worker, unless it has ended."""
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, b"%d\n" % number)


def finished():
    """Pid and return code (negative: a signal) of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (status := os.waitpid(-1, os.WNOHANG))[0]:
            yield status[0], os.waitstatus_to_exitcode(status[1])


def become(request: dict) -> None:
    """Turn a forked child into the process that was asked for."""
    os.setsid()
    streams = [(os.devnull, os.O_RDONLY)]
    streams += [(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("stdout", "stderr")]
    for descriptor, (path, flags) in enumerate(streams):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["engine", *request["argv"]]


def forget_the_server() -> None:
    """Give a forked child the signal handlers of a fresh interpreter."""
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):  # `nohup make test` ignores SIGHUP
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def work(order: dict) -> None:
    """Be the worker that an ``engine`` command has ordered."""
    order.pop("server").close()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    forked_workers.work(**order | {"passed": [Connection(number) for number in order["passed"]]})


def run(request: dict, main) -> None:
    """What ``engine ARGV`` does, after the prelude."""
    become(request)
    if FORKS:
        start = functools.partial(forked_workers.Ordered, request["server"])
        subprocess.Popen = functools.partial(forked_workers.popen, start=start)
    if request["prelude"]:
        runpy.run_path(request["prelude"])
    sys.exit(main(request["argv"]))


def end_as_an_interpreter(call) -> None:
    """Call it and end the process as Python would, but for the half second that clearing torch's modules takes."""
    code = 0
    try:
        call()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    for module in IMPORTED:
        importlib.import_module(module)
    from engine_core.cli.main import main
    from engine_core.plugins.metadata import installed

    installed()  # read once for all children
    gc.freeze()  # children neither copy nor collect what was imported
    if (request := serve()) is not None:
        forget_the_server()
        end_as_an_interpreter(lambda: work(request) if request["passed"] else run(request, main))
