"""Processes with a mark are killed with all that they have started, and no others."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from engine_core.marked_processes import MARK, kill_marked

PROGRAM = """
import subprocess
child = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""


def started(mark: str) -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """Return a marked process and the child that it has started in another session."""
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {MARK: mark})
    assert process.stdout is not None
    return process, psutil.Process(int(process.stdout.readline()))


def test_a_marked_process_is_killed_with_its_children_in_other_sessions_and_no_other():
    one, two = started("one"), started("two")
    kill_marked({"one", "none"})
    psutil.wait_procs([one[1]], timeout=20)
    assert one[0].wait(20) == -9
    assert not one[1].is_running() or one[1].status() == psutil.STATUS_ZOMBIE
    assert two[0].poll() is None
    assert two[1].status() != psutil.STATUS_ZOMBIE
    kill_marked({"two"})
    assert two[0].wait(20) == -9
