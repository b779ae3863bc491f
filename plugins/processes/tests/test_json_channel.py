"""A process that was forked and goes on keeps nothing alive that was to end with its parent."""

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from engine_plugin_processes.json_channel import close_in_children

SECONDS = 30.0
FORKS = """
import os, time
{start}

if (child := os.fork()) == 0:
    time.sleep(600)
print(process.pid, child, flush=True)
time.sleep(600)
"""
WORKERS = {
    "rank": "from engine_plugin_processes.worker_process import WorkerHandle\nprocess = WorkerHandle.start(0, {}).process.popen",
    "reward": 'from engine_plugin_rewards.worker_pool.pool import Worker\nWorker.send = lambda *message: None\nheld = Worker({}, "mark")\nprocess = held.popen',
    "data": "from engine_plugin_processes.row_workers import Worker\nWorker.send = lambda *message: None\nheld = Worker(0, {})\nprocess = held.popen",
}


def test_it_is_closed_in_a_process_that_is_forked_and_stays_open_here():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        close_in_children(ours)
        if (child := os.fork()) == 0:
            os._exit(0 if ours.fileno() < 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ours.send(b"x")
        assert theirs.recv(1) == b"x"


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORKERS)
def test_a_worker_ends_with_its_controller_also_where_that_has_forked(kind):
    run = subprocess.Popen([sys.executable, "-c", FORKS.format(start=WORKERS[kind])], stdout=subprocess.PIPE)
    with run.stdout:
        worker, child = map(psutil.Process, map(int, run.stdout.readline().split()))
    run.kill()
    run.wait()
    try:
        end = time.monotonic() + SECONDS
        while runs(worker):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert runs(child)
    finally:
        child.kill()


def runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
