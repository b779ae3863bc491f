import json

import pytest

from engine_core import faults
from engine_core.config.models import CheckpointConfig
from engine_core.errors import DataError
from engine_core.runs.checkpoint import MANIFEST, MAX_MANIFEST_BYTES, Checkpoints, problems, read_state


@pytest.fixture
def store(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", CheckpointConfig(keep_last=2))


def writer(text="weights"):
    def write(folder):
        (folder / "actor").mkdir()
        (folder / "actor" / "model.safetensors").write_text(text)

    return write


def test_a_saved_checkpoint_verifies_and_gives_its_state_back(store):
    path = store.save(3, writer(), {"data": {"position": 7}})
    assert problems(path) == []
    assert read_state(path) == {"step": 3, "data": {"position": 7}}
    assert store.latest() == path


def test_a_state_comes_back_with_its_keys_in_order(store):
    state = read_state(store.save(3, writer(), {"sums": {"b": 1.0, "a": 2.0}}))
    assert list(state["sums"]) == ["b", "a"]


def test_a_large_state_comes_back(store):
    text = "x" * MAX_MANIFEST_BYTES
    assert read_state(store.save(3, writer(), {"text": text}))["text"] == text


def test_a_failure_while_writing_leaves_what_was_there_and_no_rubbish(store):
    good = store.save(1, writer(), {})

    def fail(folder):
        (folder / "half").write_text("x")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.save(2, fail, {})
    assert store.latest() == good
    assert [p.name for p in store.folder.iterdir()] == [good.name]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "actor/model.safetensors").write_text("weightz"), "does not match its hash"),
        (lambda p: (p / "actor/model.safetensors").write_text("w"), "has 1 bytes, expected 7"),
        (lambda p: (p / "actor/model.safetensors").unlink(), "is missing"),
        (lambda p: (p / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda p: (p / MANIFEST).write_text("{"), "manifest.json cannot be read"),
        (lambda p: (p / MANIFEST).write_text('{"format": 9, "files": {}}'), "format 9"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(store, damage, message, caplog):
    good = store.save(1, writer(), {})
    bad = store.save(2, writer(), {})
    damage(bad)
    assert message in problems(bad)[0]
    assert store.latest() == good
    assert "step_00000002 is not usable" in caplog.text


def test_a_manifest_with_a_name_that_no_file_can_have_is_refused(store):
    path = store.save(1, writer(), {})
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["x" * 300] = {"bytes": 1, "sha256": "0"}
    (path / "manifest.json").write_text(json.dumps(manifest))
    (problem,) = problems(path)
    assert problem.endswith("xxx cannot be read (File name too long)")


def test_a_manifest_that_is_a_link_is_refused(store, tmp_path):
    path = store.save(1, writer(), {})
    (path / "manifest.json").rename(tmp_path / "elsewhere.json")
    (path / "manifest.json").symlink_to(tmp_path / "elsewhere.json")
    assert problems(path) == ["manifest.json is a link; a checkpoint holds files only"]


def test_a_manifest_that_points_outside_is_refused(store, tmp_path):
    path = store.save(1, writer(), {})
    (tmp_path / "secret").write_text("x")
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"]["../../secret"] = {"bytes": 1, "sha256": "0"}
    (path / MANIFEST).write_text(json.dumps(manifest))
    assert problems(path) == ["../../secret points outside the checkpoint"]


def test_only_the_last_ones_are_kept_and_a_broken_one_never_counts(store):
    for step in (1, 2):
        store.save(step, writer(), {})
    (store.path(2) / MANIFEST).unlink()
    store.save(3, writer(), {})
    store.save(4, writer(), {})
    assert store.steps() == [2, 3, 4]
    assert store.latest() == store.path(4)


def test_a_later_one_that_a_resume_passed_over_does_not_push_out_the_new_one(tmp_path):
    store = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(keep_last=1))
    damaged = store.save(4, writer(), {})
    (damaged / "actor/model.safetensors").write_text("weightz")  # of the same size
    assert store.save(3, writer(), {}) == store.latest() == store.path(3)


def test_a_checkpoint_is_chosen_by_its_step_or_its_rank(tmp_path):
    config = CheckpointConfig(keep_last=1, best_metric="loss", best_mode="min")
    store = Checkpoints(tmp_path / "checkpoints", config)
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan")}
    for step, loss in losses.items():
        store.save(step, writer(), {"metrics": {"loss": loss}})
    assert store.steps() == [2, 4]
    assert store.chosen() == store.chosen(4) == store.path(4)
    assert store.chosen(best=True) == store.chosen(2) == store.path(2)
    (store.path(2) / "actor/model.safetensors").write_text("weightz")
    with pytest.raises(
        DataError, match=r"--step best: no checkpoint of \S+ has a value of checkpoint.best_metric"
    ):
        store.chosen(best=True)
    with pytest.raises(
        DataError, match=r"--step 2: checkpoint .* does not match its hash. Choose another of \[2, 4\]"
    ):
        store.chosen(2)


def test_an_old_one_that_cannot_be_deleted_fails_no_save(store, monkeypatch, caplog):
    for step in (1, 2):
        store.save(step, writer(), {})
    passed = []

    def fail(point):
        passed.append(point)
        if point == "checkpoint.in_prune":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(faults, "_passed", fail)
    assert store.save(3, writer(), {}) == store.latest()
    assert "checkpoint.in_prune" in passed
    assert "could not be deleted" in caplog.text
    assert store.steps() == [2, 3]


def test_a_checkpoint_is_never_overwritten(store):
    path = store.save(1, writer("first"), {})
    assert store.save(1, writer("second"), {}) == path
    assert (path / "actor" / "model.safetensors").read_text() == "first"


def test_no_checkpoint_at_all_is_said_with_what_to_do(store):
    with pytest.raises(DataError, match=r"No usable checkpoint in .*engine train"):
        store.latest()
