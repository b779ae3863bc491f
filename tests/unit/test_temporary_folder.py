"""Temporary folders are gone when their process has ended, or once another process makes one at the same place."""

import gc
import os
import signal
import subprocess
import sys

import pytest

from engine_core.temporary_folder import NAME, YOUNG_SECONDS, TemporaryFolder

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


@pytest.fixture
def start(tmp_path):
    """``start(how)``: a process that holds two folders in ``tmp_path``; it is killed at the end of the test."""
    started = []

    def make(how):
        command = [sys.executable, "-c", HOLDS, str(tmp_path), how]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert started[-1].stdout.readline() == b"made\n"
        return started[-1]

    yield make
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def grow_old(*paths):
    for path in paths:
        then = os.stat(path).st_mtime - 2 * YOUNG_SECONDS
        os.utime(path, (then, then))


def test_a_process_that_ends_leaves_no_folder(tmp_path, start):
    assert start("ends").wait(30) == 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_leaves_is_removed_by_the_next_one(tmp_path, start):
    process = start("waits")
    left = list(tmp_path.iterdir())
    grow_old(*left)
    TemporaryFolder("a-", tmp_path).remove()
    assert sorted(tmp_path.iterdir()) == sorted(left)  # its owner lives
    process.send_signal(signal.SIGKILL)
    process.wait()
    grow_old(left[0])
    os.utime(left[1])
    TemporaryFolder("a-", tmp_path).remove()
    assert list(tmp_path.iterdir()) == [left[1]]  # as young as one whose owner has not locked it yet
    grow_old(left[1])
    TemporaryFolder("a-", tmp_path).remove()
    assert list(tmp_path.iterdir()) == []


def test_other_folders_files_and_links_of_the_same_name_stay(tmp_path):
    (tmp_path / "engine-mine").mkdir()
    (tmp_path / f"{NAME}file").touch()
    (tmp_path / f"{NAME}link").symlink_to(tmp_path / "engine-mine")
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    TemporaryFolder("a-", tmp_path).remove()
    assert {path.name for path in tmp_path.iterdir()} == {"engine-mine", f"{NAME}file", f"{NAME}link"}


def test_a_folder_is_for_its_user_alone_and_removed_once(tmp_path):
    folder = TemporaryFolder("a-", tmp_path)
    assert oct(os.stat(folder.path).st_mode & 0o777) == "0o700"
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


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
