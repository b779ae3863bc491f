"""Row 6: one process at a time works on a run."""

import os
import platform
import signal

import pytest

pytestmark = pytest.mark.chaos


def test_a_second_process_is_refused_and_told_which_one_holds_the_run(engine, tiny, straight, result):
    run = engine.start("train", tiny({"run.steps": 100000}))
    run.until(lambda: list(engine.folder.glob("runs/r/checkpoints/step_*")), "a checkpoint")
    for command in (["resume", "r"], ["prune", "r"]):
        second = engine(*command)
        assert second.code == 5
        assert f"in use by process {run.pid} on {platform.node()}" in second.err
        assert "Traceback" not in second.err
    assert run.code is None
    run.send(signal.SIGKILL)
    run.wait()
    resumed = engine("resume", "r", "--set", "run.steps=1", env={})
    assert resumed.code == 0, resumed.err


def test_the_lock_of_a_killed_process_is_no_obstacle(engine, tiny, straight, result):
    killed = engine("train", tiny(), env={"ENGINE_FAULT": "step.train@3:kill"})
    assert killed.code == -signal.SIGKILL
    lock = (engine.folder / "runs" / "r" / ".lock").read_text()
    assert str(killed.pid) in lock
    assert not os.path.exists(f"/proc/{killed.pid}")
    resumed = engine("resume", "r")
    assert resumed.code == 0, resumed.err
    assert result() == straight()


def test_two_resumes_started_at_once_are_one_that_trains_and_one_that_is_refused(
    engine, tiny, straight, result
):
    engine("train", tiny({"run.steps": 12}), env={"ENGINE_FAULT": "step.train@3:kill"})
    both = [engine.start("resume", "r") for _ in range(2)]
    codes = sorted(process.wait().code for process in both)
    assert codes in ([0, 5], [0, 0])  # the second may come when the first is done
    assert result() == straight({"run.steps": 12})
