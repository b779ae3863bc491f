"""Row 27: what may change between a checkpoint and its resume (in one process; other world sizes need another runtime)."""

import json
import shutil

import pytest

pytestmark = pytest.mark.chaos


@pytest.fixture
def stopped(engine, tiny):
    """A run of two steps of four."""
    run = engine("train", tiny({"run.steps": 2}))
    assert run.code == 0, run.err
    return run


def test_learning_rate_and_length_may_change_and_the_change_is_told(engine, stopped, metrics):
    run = engine("resume", "r", "--steps", 4, "--set", "actor.optim.lr=0.005")
    assert run.code == 0, run.err
    assert "actor.optim.lr: 0.01 -> 0.005 (allowed)" in run.err
    assert [line["actor/lr"] for line in metrics()] == [0.01, 0.01, 0.005, 0.005]


def test_another_batch_is_warned_of(engine, stopped, metrics):
    run = engine("resume", "r", "--steps", 4, "--set", "rollout.group_size=3")
    assert run.code == 0, run.err
    assert "WARNING" in run.err
    assert "rollout.group_size: 2 -> 3 (warned" in run.err
    assert [line["rollouts"] for line in metrics()] == [8, 8, 12, 12]


def test_another_model_is_refused_and_nothing_of_the_run_is_changed(engine, stopped, tiny_world, tmp_path):
    shutil.copytree(tiny_world / "model", tmp_path / "larger")
    config = json.loads((tmp_path / "larger" / "config.json").read_text())
    (tmp_path / "larger" / "config.json").write_text(json.dumps(config | {"hidden_size": 32, "head_dim": 16}))
    run = engine.folder / "runs" / "r"
    before = (run / "metrics.jsonl").read_text()
    change = ["--set", f"model.path={tmp_path / 'larger'}"]
    refused = engine("resume", "r", "--steps", 4, *change)
    assert refused.code == 2, refused.err
    assert "model.path: the checkpoint was written with" in refused.err
    assert "--force model.path" in refused.err
    forced = engine("resume", "r", "--steps", 4, *change, "--force", "model.path")
    assert forced.code not in (0, 1), forced.err  # its tensors do not fit, whoever says so
    assert "Traceback" not in forced.err
    assert (run / "metrics.jsonl").read_text() == before


def test_a_force_that_forces_nothing_is_refused(engine, stopped):
    run = engine("resume", "r", "--steps", 4, "--force", "actor.optim.lr")
    assert run.code == 2
    assert "--force actor.optim.lr: nothing of that name changed" in run.err


def test_another_version_of_a_plugin_is_told(engine, stopped):
    plugin = engine.folder / "tiny.py"
    plugin.write_text(plugin.read_text() + "\n# a later version\n")
    run = engine("resume", "r", "--steps", 4)
    assert run.code == 0, run.err
    assert "Changed since step_00000002: plugins.tiny.py: sha256:" in run.err


def test_a_plugin_that_is_loaded_later_in_a_run_is_no_change(engine, tiny):
    rewards = '[[reward]]\nname = "bytes_share"\nworkers = 1\n'  # its workers come from engine-plugin-rewards
    assert engine("train", tiny({"run.steps": 2}, reward=rewards)).code == 0
    run = engine("resume", "r", "--steps", 4)
    assert run.code == 0, run.err
    assert "plugins." not in run.err


def test_data_with_other_rows_are_refused_and_other_content_is_warned_of(engine, tiny, tmp_path, tiny_world):
    shutil.copy(tiny_world / "data" / "train.jsonl", tmp_path / "mine.jsonl")
    assert engine("train", tiny({"run.steps": 2, "data.train": str(tmp_path / "mine.jsonl")})).code == 0
    lines = (tmp_path / "mine.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "mine.jsonl").write_text("".join(lines[:-1]))
    refused = engine("resume", "r", "--steps", 4)
    assert refused.code == 4, refused.err
    assert "its files had [24] rows, now [23]" in refused.err
    (tmp_path / "mine.jsonl").write_text("".join([*lines[:-1], lines[0]]))
    warned = engine("resume", "r", "--steps", 4)
    assert warned.code == 0, warned.err
    assert "in content but not in number of rows" in warned.err
