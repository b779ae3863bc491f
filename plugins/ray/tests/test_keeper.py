"""A private cluster is removed when the process that started it has ended."""

import os
import subprocess
import sys
import time

import psutil

from engine_plugin_ray.keeper import MARK


def test_the_end_of_the_pipe_ends_marked_processes_and_removes_the_folder_and_nothing_else(tmp_path):
    folder = tmp_path / "cluster"
    (folder / "deep").mkdir(parents=True)
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    marked = subprocess.Popen(sleeper, env={**os.environ, MARK: str(folder)}, start_new_session=True)
    other = subprocess.Popen(sleeper, env={**os.environ, MARK: str(tmp_path / "another")})
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "engine_plugin_ray.keeper", str(reading), str(folder)]
    keeper = subprocess.Popen(command, pass_fds=[reading])
    try:
        time.sleep(1.0)
        assert marked.poll() is None
        os.close(writing)
        os.close(reading)
        assert keeper.wait(60) == 0
        assert marked.wait(10) == -9
        assert not folder.exists()
        assert psutil.pid_exists(other.pid)
        assert other.poll() is None
    finally:
        for process in (marked, other, keeper):
            process.kill()
            process.wait()
