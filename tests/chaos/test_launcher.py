"""The launcher itself: children are fresh processes that can be killed, and nothing of theirs is missed."""

import os
import signal

import pytest

pytestmark = pytest.mark.chaos


def test_a_tiny_run_is_trained_in_a_process_of_its_own(engine, tiny):
    run = engine("train", tiny())
    assert run.code == 0, run.err
    assert run.out.strip() == str(engine.folder / "runs" / "r")
    assert run.pid != os.getpid()


def test_a_child_that_is_killed_tells_its_signal(engine, tiny):
    run = engine.start("train", tiny({"run.steps": 100000}))
    run.until(lambda: list(engine.folder.glob("runs/r/checkpoints/step_*")), "a checkpoint")
    run.send(signal.SIGKILL)
    assert run.wait().code == -signal.SIGKILL
    assert run.orphans() == []


def test_a_process_that_outlives_its_parent_is_found_by_group_and_by_mark(engine, tiny):
    leave = "import os, subprocess, sys, time\nif os.fork() == 0:\n    time.sleep(60)\n"
    by_group = engine.start("--version", prelude=leave).wait()
    assert len(by_group.orphans(patience=0)) == 1
    leave = 'import subprocess\nsubprocess.Popen(["sleep", "60"], start_new_session=True)\n'
    by_mark = engine.start("--version", prelude=leave).wait()
    assert by_mark.orphans(patience=0) == ["sleep 60"]


def test_an_exit_code_and_an_uncaught_exception_are_those_of_an_interpreter(engine):
    assert engine("train", "absent.toml").code == 2
    broken = engine("--version", prelude="raise RuntimeError('by the prelude')")
    assert broken.code == 1
    assert "RuntimeError: by the prelude" in broken.err
