"""A part of a run is killed: the run ends with the cause, or continues; nothing is left behind and nothing is lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from engine_core.runs.checkpoint import Checkpoints, problems

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

RUN = """
[model]
path = "model"
[actor.optim]
lr = 1e-3
[rollout]
group_size = 4
max_response_tokens = 8
[[reward]]
name = "numeric"
[data]
train = "train.jsonl"
prompts_per_step = 4
[run]
steps = 8
name = "r"
[checkpoint]
every_steps = 1
[runtime]
backend = "ray"
"""
SECONDS = 240.0  # of a command, where the machine is busy
TIMED = ("time", "throughput/", "memory/", "sync/")


class Runs:
    """A folder in which commands run, whose temporary files and processes are marked by a variable."""

    def __init__(self, folder, temporary):
        self.folder, self.temporary = folder, temporary

    @contextmanager
    def started(self, *words):
        """Start a command in a separate process group, as a shell does."""
        with (self.folder / "err").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "engine_core.cli.main", *words],
                cwd=self.folder,
                env={**os.environ, "TMPDIR": str(self.temporary)},
                stdout=subprocess.DEVNULL,
                stderr=err,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    @property
    def said(self):
        return (self.folder / "err").read_text()

    def until(self, found, process):
        deadline = time.monotonic() + SECONDS
        while not found():
            assert process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def steps(self):
        return Checkpoints(self.folder / "runs" / "r" / "checkpoints").steps()

    def left(self):
        """Return the processes of the run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TMPDIR") == str(self.temporary):
                    found.append(" ".join(process.cmdline()) or process.name())
            except psutil.Error:
                continue
        return found

    def folders(self):
        """Return the folders of private clusters."""
        return list(self.temporary.glob("engine-tmp-ray-*"))

    def nothing_is_left(self, seconds):
        deadline = time.monotonic() + seconds
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def workers(self):
        """Return the processes of ranks."""
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.name().startswith("ray::Seat")
                    and process.environ().get("TMPDIR") == str(self.temporary)
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def metrics(self, name="r"):
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMED)} for line in lines]


@pytest.fixture
def runs(world, tmp_path):
    (tmp_path / "model").symlink_to(world / "model")
    shutil.copy(world / "train.jsonl", tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    temporary = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield Runs(tmp_path, temporary)
    shutil.rmtree(temporary)


@pytest.fixture
def straight(runs):
    with runs.started("train", "run.toml", "--set", "run.name=s", "--set", "runtime.backend=local") as run:
        assert run.wait(SECONDS) == 0, runs.said
    return runs.metrics("s")


def test_a_worker_that_is_killed_ends_the_run_within_seconds_with_its_cause(runs):
    with runs.started("train", "run.toml", "--set", "run.steps=1000") as run:
        runs.until(lambda: runs.steps(), run)
        (worker,) = runs.workers()
        began = time.monotonic()
        worker.kill()
        assert run.wait(60) == 6, runs.said
        assert time.monotonic() - began < 30  # and what it had started has ended too
    assert re.search(r"Lost worker (actor|rollout)\[0\] on ", runs.said)  # the rank that was called last
    assert f"process {worker.pid} ended: its worker process has died" in runs.said
    assert "Traceback" not in runs.said
    assert problems(runs.folder / "runs" / "r" / "checkpoints" / f"step_{runs.steps()[-1]:08d}") == []
    runs.nothing_is_left(0)
    assert not runs.folders()


def test_a_run_that_may_start_again_ends_as_the_straight_one(runs, straight):
    with runs.started("train", "run.toml", "--set", "runtime.ray.max_restarts=1") as run:
        runs.until(lambda: runs.steps(), run)
        for worker in runs.workers():
            worker.kill()
        assert run.wait(SECONDS) == 0, runs.said
    assert "with new workers (0 restarts left)" in runs.said
    assert runs.metrics() == straight
    runs.nothing_is_left(0)


def test_a_controller_that_is_killed_or_stopped_leaves_nothing_but_a_run_that_goes_on(runs, straight):
    with runs.started("train", "run.toml") as run:
        runs.until(lambda: runs.steps(), run)
        run.kill()
        run.wait()
        runs.nothing_is_left(60)  # cluster and workers
    seen = runs.steps()[-1]
    with runs.started("resume", "r", "--set", "run.steps=1000") as run:
        runs.until(lambda: runs.steps()[-1] > seen, run)
        run.send_signal(signal.SIGTERM)
        assert run.wait(SECONDS) == 75, runs.said
    runs.nothing_is_left(0)
    with runs.started("train", "run.toml", "--set", "run.name=t") as run:
        runs.until(lambda: (runs.folder / "runs" / "t" / "metrics.jsonl").exists(), run)
        os.killpg(run.pid, signal.SIGINT)  # Ctrl-C goes to all of a terminal's processes
        assert run.wait(SECONDS) in (130, -signal.SIGINT), runs.said
    runs.nothing_is_left(0)
    assert runs.metrics()[:seen] == straight[:seen]
