"""Temporary folders are gone when their process is, however it ended; and nothing is left beside a process that needs none."""

import gc
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from engine_core import temporary_folder as module
from engine_core.temporary_folder import _KEEPER, Keeper, TemporaryFolder

SECONDS = 30.0  # for what comes at once
HOLDS = """
import os, sys, time
from engine_core.temporary_folder import TemporaryFolder
folders = [TemporaryFolder("test-", sys.argv[1]) for _ in range(2)]
for folder in folders:
    open(os.path.join(folder.path, "file"), "w").close()
print("made", flush=True)
if sys.argv[2] == "waits":
    time.sleep(600)
"""

FORKS = """
import os, sys
from engine_core.temporary_folder import _KEEPER, TemporaryFolder
folder, beside = TemporaryFolder("test-", sys.argv[1]), _KEEPER._process
reading, writing = os.pipe()
if os.fork() == 0:
    os.close(writing)
    os.read(reading, 1)  # as long as the other one is there
    os._exit(0)
folder.remove()
print("ended with", beside.returncode, flush=True)
"""


def until(found):
    end = time.monotonic() + SECONDS
    while not found():
        assert time.monotonic() < end
        time.sleep(0.02)


def ignored(pid):
    """The signals that a process ignores."""
    with open(f"/proc/{pid}/status") as file:
        mask = int(next(line for line in file if line.startswith("SigIgn:")).split()[1], 16)
    return {number for number in signal.Signals if mask & 1 << number - 1}


def start(folder, how, prepare=None):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder), how],
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=prepare,
    )
    assert process.stdout.readline() == b"made\n"
    return process


@pytest.mark.parametrize("whom", ["process", "group"])
def test_a_process_that_is_killed_leaves_no_folder_and_no_process(tmp_path, whom):
    process = start(tmp_path, "waits")
    beside = psutil.Process(process.pid).children()
    assert len(beside) == 1
    assert len(list(tmp_path.iterdir())) == 2
    (os.killpg if whom == "group" else os.kill)(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not list(tmp_path.iterdir()))
    until(lambda: not beside[0].is_running())
    process.stdout.close()


def test_a_process_that_ends_leaves_none_without_being_told_to(tmp_path):
    process = start(tmp_path, "ends")
    assert process.wait(SECONDS) == 0
    assert list(tmp_path.iterdir()) == []
    process.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("under_nohup", [False, True])
def test_signals_of_the_terminal_do_not_end_the_one_that_looks_after_folders(tmp_path, under_nohup):
    hangup = signal.SIG_IGN if under_nohup else signal.SIG_DFL
    process = start(tmp_path, "waits", lambda: signal.signal(signal.SIGHUP, hangup))
    (beside,) = psutil.Process(process.pid).children()
    terminal = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    until(lambda: terminal <= ignored(beside.pid))  # all of them: SIGHUP may be ignored from the start
    for number in terminal:
        beside.send_signal(number)
    process.kill()
    process.wait()
    until(lambda: not list(tmp_path.iterdir()))
    process.stdout.close()


def test_with_the_last_folder_the_one_beside_goes_and_its_pipe_with_it(tmp_path):
    gc.collect()  # folders that earlier tests have let go
    before = set(_KEEPER._folders)
    first, second = TemporaryFolder("a-", tmp_path), TemporaryFolder("b-", tmp_path)
    beside, pipe = _KEEPER._process, _KEEPER._pipe
    assert oct(os.stat(first.path).st_mode & 0o777) == "0o700"
    first.remove()
    first.remove()
    assert not os.path.exists(first.path)
    assert beside.poll() is None
    second.remove()
    assert list(tmp_path.iterdir()) == []
    if not before:
        assert beside.poll() == 0
        assert _KEEPER._process is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(pipe)


def test_a_folder_goes_with_the_object_that_holds_it(tmp_path):
    folder = TemporaryFolder("a-", tmp_path)
    path = folder.path
    del folder
    gc.collect()
    assert not os.path.exists(path)


def test_a_process_that_was_forked_leaves_its_parents_folders_alone(tmp_path):
    folder = TemporaryFolder("a-", tmp_path)
    child = os.fork()
    if child == 0:
        folder.remove()
        own = TemporaryFolder("b-", tmp_path)
        own.remove()
        os._exit(0 if os.path.exists(folder.path) and not os.path.exists(own.path) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_was_forked_and_goes_on_holds_up_nobody(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "ended with 0\n", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_stays_where_the_one_before_is_let_go_while_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_KEEPER", Keeper())
    held = [TemporaryFolder("a-", tmp_path)]
    write = os.write

    def garbage(pipe, told):
        written = write(pipe, told)
        held.clear()
        return written

    monkeypatch.setattr(module.os, "write", garbage)
    folder = TemporaryFolder("b-", tmp_path)
    monkeypatch.setattr(module.os, "write", write)
    assert module._KEEPER._process is not None
    assert [str(path) for path in tmp_path.iterdir()] == [folder.path]
    folder.remove()
    assert list(tmp_path.iterdir()) == []
