"""The state of a run from its files."""

from __future__ import annotations

import fcntl
import json

import pytest

from engine_plugin_tools.run_state import run_state

HEAD = "INFO    engine: 4 steps of 8 rows, 1 optimizer step(s) each, 4 in all."


def make(tmp_path, steps, *records, attempt=0):
    folder = tmp_path / "logs" / f"attempt_{attempt}"
    folder.mkdir(parents=True)
    (folder / "run.log").write_text("".join(f"2026-01-02 03:04:05,678 {record}\n" for record in records))
    lines = [json.dumps({"step": i, "time": 100.0 + i, "reward/mean": i / 10}) + "\n" for i in range(1, steps + 1)]  # fmt: skip
    (folder / "env.json").write_text(json.dumps({"started": f"1970-01-01T00:0{attempt % 9}:40+00:00"}))
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 99, "cut')
    return tmp_path


FAILED = (
    "ERROR   engine: The reward 'x' failed.\nTraceback (most recent call last):",
    "ERROR   engine: The run failed in step 3. Resume it.",
    "ERROR   engine: The workers did not end cleanly: lost",
)


@pytest.mark.parametrize(
    ("steps", "records", "state", "reason"),
    [
        (4, [], "finished", ""),
        (2, ["INFO    engine: The run ends after step 2. reward/mean has reached its goal."], "finished", ""),
        (2, FAILED, "failed", "The reward 'x' failed."),
        (2, ["CRITICAL engine: Uncaught KeyError"], "failed", "Uncaught KeyError"),
        (2, ["WARNING engine: Stopped by SIGTERM after step 2."], "stopped", "Stopped by SIGTERM after step 2."),
        (2, [], "stopped", "The log ends without a reason: the process may have been killed."),
    ],
)  # fmt: skip
def test_the_log_says_how_a_run_ended(tmp_path, steps, records, state, reason):
    found = run_state(make(tmp_path, steps, HEAD, *records))
    assert (found.state, found.reason) == (state, reason)
    assert (found.step, found.steps, found.reward) == (steps, 4, steps / 10)
    assert (found.started, found.updated) == (40.0, 100.0 + steps)


def test_a_run_whose_lock_is_held_is_running_and_looking_takes_no_lock(tmp_path):
    folder = make(tmp_path, 2, HEAD)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run_state(folder).state == "running"
        fcntl.flock(file, fcntl.LOCK_UN)
        assert run_state(folder).state == "stopped"
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("text", ["null", "[]", '{"started": null}', "{"])
def test_a_start_that_cannot_be_read_is_that_of_the_folder(tmp_path, text):
    run = make(tmp_path, 2, HEAD)
    (folder := run / "logs" / "attempt_0").joinpath("env.json").write_text(text)
    assert run_state(run).started == pytest.approx(folder.stat().st_mtime, abs=5)


def test_only_the_newest_attempt_counts_and_its_warnings_are_kept(tmp_path):
    make(tmp_path, 2, HEAD, *FAILED)
    found = run_state(make(tmp_path, 4, HEAD, "WARNING engine: Careful.", attempt=10))
    assert (found.state, found.attempts, found.warnings) == ("finished", 2, ("Careful.",))
    assert found.started == 40.0  # of the first attempt


def test_a_log_without_informing_records_leaves_the_planned_steps_to_the_config(tmp_path):
    make(tmp_path, 4)
    (tmp_path / "config.resolved.toml").write_text("[run]\nsteps = 4\n")
    assert (run_state(tmp_path).state, run_state(tmp_path).steps) == ("finished", 4)


def test_a_folder_without_records_has_done_no_step(tmp_path):
    found = run_state(tmp_path)
    assert (found.state, found.step, found.steps, found.reward) == ("stopped", 0, None, None)
