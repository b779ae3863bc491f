"""How a run stands: which checkpoint is good, how far the reading came. Whole runs: tests/chaos/test_ends.py."""

import errno
import threading
from types import SimpleNamespace

import pytest

from engine_core.runs.checkpoint import Checkpoints
from engine_core.train.stopping import report_failure, report_stop, resume_command, resume_hint, standing

BIG = 6 * 2**30  # bytes with no block on the disk; hashing them takes seconds


def saved(folder, *steps):
    store = Checkpoints(folder, keep_last=9)
    for step in steps:
        store.save(step, lambda path: (path / "weights").write_text("weights"), {})
    return store


@pytest.fixture
def large(tmp_path):
    """A checkpoint that takes seconds to read, whose manifest is of another content."""
    store = saved(tmp_path, 7)
    manifest, file = store.path(7) / "manifest.json", store.path(7) / "weights"
    with file.open("r+b") as opened:
        opened.truncate(BIG)
    manifest.write_text(manifest.read_text().replace('"bytes": 7', f'"bytes": {BIG}'))
    return store


def test_the_newest_one_that_is_whole_is_verified_and_its_size_told(tmp_path):
    found = standing(saved(tmp_path, 1, 2), 60)
    assert (found.step, found.good, found.complete, found.damaged) == (2, True, True, [])
    assert found.files == 2
    assert found.read == found.total > 7
    assert found.text.startswith(
        "The checkpoint of step 2 is verified: all 2 files (0.0 MB) match their hashes, "
    )


def test_one_that_is_damaged_is_named_with_its_file_and_the_one_before_verified(tmp_path):
    store = saved(tmp_path, 1, 2, 3)
    (store.path(3) / "weights").unlink()
    (store.path(2) / "weights").write_text("weightz")
    found = standing(store, 60)
    assert (found.step, found.good) == (1, True)
    assert found.text.startswith(
        f"Checkpoint {store.path(3)} is not usable: weights is missing. "
        f"Checkpoint {store.path(2)} is not usable: weights does not match its hash. "
        "The checkpoint of step 1 is verified: "
    )


def test_no_checkpoint_at_all_has_nothing_to_tell(tmp_path):
    found = standing(Checkpoints(tmp_path / "absent"), 60)
    assert (found.step, found.good, found.complete, found.text) == (None, False, True, "")


def test_the_time_is_bounded_and_how_far_it_came_is_told(large):
    found = standing(large, 0.3)
    assert (found.step, found.good, found.complete) == (7, False, False)
    assert 0 < found.read < BIG
    assert (
        f"verified in part: {found.read / 1e9:.1f} GB of" in found.text
        or "MB of 6.4 GB were read" in found.text
    )
    reading = [thread for thread in threading.enumerate() if thread.name == "verify-checkpoint"]
    for thread in reading:
        thread.join(60)
    assert not any(thread.is_alive() for thread in reading)  # it was not read to its end


def test_a_signal_ends_the_reading(large):
    told = iter([False, False, True])
    found = standing(large, 3600, unless=lambda: next(told))
    assert (found.good, found.complete) == (False, False)


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


@pytest.fixture
def stale(tmp_path, monkeypatch):
    """A run whose checkpoints lie on a server that has gone."""

    def gone(self):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Checkpoints, "steps", gone)
    folder = SimpleNamespace(path=tmp_path, checkpoints=tmp_path / "checkpoints")
    return SimpleNamespace(
        folder=folder,
        step_now=3,
        verified=None,
        end_workers=lambda: None,
        signals=SimpleNamespace(requested=None),
    )


def test_a_folder_that_cannot_be_read_does_not_hide_the_cause(stale, caplog, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    cause = RuntimeError("the cause")
    with caplog.at_level("INFO", "engine"):
        report_failure(stale, cause, began=True)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "the cause"
    assert said[1].endswith("checkpoints cannot be read: [Errno 116] Stale file handle.")
    way = f"Its checkpoints could not be read. Once they can: engine resume {stale.folder.path}"
    assert said[2] == f"The run failed in step 3. {way}"
    assert cause.__notes__ == [way]
    assert resume_hint(stale) == way  # after a first signal, and one that ends the run at once


def test_nothing_is_looked_at_but_in_the_thread_that_reads(stale, monkeypatch):
    """A server that does not answer holds nobody up."""
    looked, left = [], threading.Event()

    def hangs(self):
        looked.append(threading.current_thread().name)
        left.wait(60)
        return []

    monkeypatch.setattr(Checkpoints, "steps", hangs)
    monkeypatch.setattr("engine_core.train.stopping.FAILED_SECONDS", 0.2)
    report_failure(stale, RuntimeError("the cause"), began=True)
    left.set()
    assert looked == ["verify-checkpoint"]


def test_workers_that_do_not_close_hide_neither_the_cause_nor_the_way_on(stale, caplog, monkeypatch):
    def fails():
        raise ValueError("a socket that is gone")

    monkeypatch.setattr(stale, "end_workers", fails)
    cause = RuntimeError("the cause")
    with caplog.at_level("INFO", "engine"):
        report_failure(stale, cause, began=True)
        report_stop(stale, saved=False)
    assert caplog.text.count("The workers did not end cleanly: a socket that is gone") == 2
    assert "Once they can: engine resume" in caplog.messages[-1]
    assert cause.__notes__ == [resume_hint(stale)]
