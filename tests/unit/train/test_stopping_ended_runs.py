"""What a run that ends early says: its cause and how it continues. Whole runs: tests/chaos/test_ends.py."""

import errno
from types import SimpleNamespace

import pytest

from engine_core.config.models import CheckpointConfig
from engine_core.runs.checkpoint import Checkpoints
from engine_core.train.loop import _close, report_failure
from engine_core.train.stopping import resume_command, resume_hint


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return SimpleNamespace(path=tmp_path, checkpoints=tmp_path / "checkpoints")


def config(every_steps=0):
    return SimpleNamespace(every_steps=every_steps, every_minutes=0)


def test_the_newest_checkpoint_and_the_command_are_named(folder):
    store = Checkpoints(folder.checkpoints, CheckpointConfig(keep_last=9))
    for step in (1, 2):
        store.save(step, lambda path: (path / "weights").write_text("weights"), {})
    expected = f"The newest checkpoint is of step 2. Resume: engine resume {folder.path}"
    assert resume_hint(folder, config()) == expected


def test_without_a_checkpoint_the_key_that_keeps_work_is_named(folder):
    said = "No checkpoint was saved"
    assert resume_hint(folder, config()) == f"{said}: set checkpoint.every_steps to keep work."
    assert resume_hint(folder, config(every_steps=5)) == f"{said}."


def test_a_folder_that_cannot_be_read_does_not_hide_the_cause(folder, monkeypatch):
    def gone(self):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Checkpoints, "steps", gone)
    way = f"Its checkpoints could not be read. Once they can: engine resume {folder.path}"
    assert resume_hint(folder, config()) == way


def test_the_command_can_be_typed_as_it_is(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert resume_command(tmp_path / "my runs" / "it's") == f"engine resume '{tmp_path}/my runs/it'\"'\"'s'"


def test_under_an_external_torchrun_it_is_said_how_to_start_it(tmp_path, monkeypatch):
    told = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert (
        resume_command(tmp_path)
        == f"engine resume {tmp_path}, on every node under torchrun as it was started"
    )


def test_a_failure_is_logged_with_its_step_and_the_way_on(caplog):
    cause = RuntimeError("the cause")
    with caplog.at_level("INFO", "engine"):
        report_failure(cause, 3, " Resume: engine resume x")
    assert caplog.messages == ["the cause", "The run failed in step 3. Resume: engine resume x"]
    assert cause.__notes__ == ["Resume: engine resume x"]


def test_a_failure_before_the_first_step_says_so(caplog):
    with caplog.at_level("INFO", "engine"):
        report_failure(RuntimeError("the cause"), 0, "")
        report_failure(KeyboardInterrupt(), 0, "")
    assert caplog.messages[1:] == [
        "The run failed at its start.",
        "The run was ended at once at its start.",
    ]


def test_workers_that_do_not_close_do_not_hide_the_cause(caplog):
    def fails():
        raise ValueError("a socket that is gone")

    _close(SimpleNamespace(close=fails))
    assert "The workers did not end cleanly: a socket that is gone" in caplog.text
