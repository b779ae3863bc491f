"""Rows 3, 4 and 5: disks that are full and checkpoints that are damaged."""

import json
import os
import shutil
import subprocess

import pytest

from engine_core.runs.checkpoint import problems

pytestmark = pytest.mark.chaos

SMALL_FILES = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"  # weights fit, the optimizer does not


def checkpoints(engine):
    return sorted(path.name for path in (engine.folder / "runs" / "r" / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("point", "action"),
    [
        ("checkpoint.begin", "nospace"),
        ("checkpoint.after_role", "ioerror"),
        ("checkpoint.in_manifest", "nospace"),
        pytest.param("checkpoint.begin", "ioerror", marks=pytest.mark.slow),
        pytest.param("checkpoint.before_publish", "nospace", marks=pytest.mark.slow),
    ],
)
def test_a_save_that_fails_is_a_warning_and_training_goes_on(engine, tiny, straight, result, point, action):
    run = engine("train", tiny(), env={"ENGINE_FAULT": f"{point}@2:{action}"})
    assert run.code == 0, run.err
    assert "Step 2 could not be saved" in run.err
    assert "The checkpoint of step 1 is untouched. Training continues" in run.err
    assert "A checkpoint needs 0." in run.err  # MB, and what is free
    assert checkpoints(engine) == ["step_00000003", "step_00000004"]
    assert result() == straight()


def test_after_a_number_of_failed_saves_in_a_row_the_run_ends(engine, tiny):
    changes = {"run.steps": 9, "checkpoint.max_failures": 2}
    run = engine("train", tiny(changes), prelude=SMALL_FILES)
    assert run.code == 5, run.err
    assert "Step 1 could not be saved" in run.err
    assert "engine: Step 2 could not be saved" in run.err
    assert "2 times in a row, checkpoint.max_failures" in run.err
    assert "There is no checkpoint yet" in run.err
    assert "Traceback" not in run.err
    assert checkpoints(engine) == []


def test_a_failed_save_after_the_last_step_is_no_success(engine, tiny):
    run = engine("train", tiny({"run.steps": 2}), env={"ENGINE_FAULT": "checkpoint.begin@2:nospace"})
    assert run.code == 5, run.err
    assert "The checkpoint of step 1 is untouched" in run.err
    assert engine("resume", "r").code == 0
    assert checkpoints(engine) == ["step_00000001", "step_00000002"]


def lines(engine):
    text = (engine.folder / "runs" / "r" / "metrics.jsonl").read_text()
    return [json.loads(line)["step"] for line in text.splitlines()]


@pytest.mark.parametrize("point", ["metrics.half_written", "rollouts.half_written"])
def test_metrics_and_rollouts_that_a_full_disk_refuses_end_the_run_and_no_step_is_lost(
    engine, tiny, straight, result, point
):
    changes = {"tracking.rollouts_every_steps": 1, "checkpoint.every_steps": 1}
    run = engine("train", tiny(changes), env={"ENGINE_FAULT": f"{point}@3:nospace"})
    assert run.code == 5, run.err
    assert "Traceback" not in run.err
    what = "metrics" if point.startswith("metrics") else "rollouts"
    assert f"engine: The {what} of step 3 could not be written: [Errno 28] No space left on device" in run.err
    assert checkpoints(engine)[-1] == "step_00000002"  # none without the records of its steps
    assert engine("resume", "r").code == 0
    assert lines(engine) == [1, 2, 3, 4]
    rollouts = engine.folder / "runs" / "r" / "rollouts"
    assert sorted(f.name for f in rollouts.iterdir() if f.is_file()) == [
        f"step_{n:06d}.parquet" for n in (1, 2, 3, 4)
    ]
    assert result() == straight()


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 384 KB: two checkpoints fit, three do not."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=384k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root; the other tests fill the disk by limits and faults")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_on_a_disk_that_is_really_full_older_checkpoints_stay_and_metrics_go_on(engine, tiny, full_disk):
    changes = {"run.dir": str(full_disk), "checkpoint.keep_last": 9, "checkpoint.max_failures": 2}
    changes |= {"run.steps": 20, "tracking.rollouts_every_steps": 0}
    run = engine("train", tiny(changes))
    assert run.code == 5, run.err
    assert "Disk:" in run.err  # said at the start: so little is free
    assert "Training continues" in run.err
    assert "No space left on device" in run.err
    folder = full_disk / "r"
    kept = sorted((folder / "checkpoints").glob("step_*"))
    assert len(kept) >= 1
    assert all(problems(path) == [] for path in kept)
    assert not list((folder / "checkpoints").glob(".step_*"))
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == len(kept) + 2


# damage

FILES = ["actor/weights.safetensors", "actor/optimizer.safetensors", "actor/state.json", "state.json"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {"truncated": truncate, "flipped": flip_a_byte, "gone": os.unlink}
QUICK = {
    ("actor/weights.safetensors", "flipped"),
    ("actor/optimizer.safetensors", "truncated"),
    ("actor/state.json", "gone"),
    ("state.json", "flipped"),
}
EACH = [
    pytest.param(file, damage, marks=[] if (file, damage) in QUICK else pytest.mark.slow)
    for file in FILES
    for damage in DAMAGES
]


@pytest.fixture
def finished(engine, tiny):
    """A run of two steps with a checkpoint of each; the folder of the newest."""
    run = engine("train", tiny({"run.steps": 2}))
    assert run.code == 0, run.err
    return engine.folder / "runs" / "r" / "checkpoints" / "step_00000002"


@pytest.mark.parametrize(("file", "damage"), EACH)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(
    engine, finished, straight, result, file, damage
):
    DAMAGES[damage](finished / file)
    strict = engine("resume", "r", "--strict")
    assert strict.code == 4
    assert file in strict.err
    assert "Traceback" not in strict.err
    resumed = engine("resume", "r")
    assert resumed.code == 0, resumed.err
    assert f"{finished} is not usable: {file}" in resumed.err
    assert "Falling back" in resumed.err
    assert result() == straight({"run.steps": 2})
    assert list(finished.parent.glob(".step_*.broken-*")) != []


MANIFESTS = {
    "missing": None,
    "empty": "",
    "half": '{"files": {"state.json": {"byt',
    "no table": "[]",
    "no files": '{"format": 1, "step": 2}',
    "of another format": '{"format": 99, "step": 2, "files": {}}',
    "binary": "\0\0\0",
}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(name, marks=[] if name in ("missing", "half", "binary") else pytest.mark.slow)
        for name in MANIFESTS
    ],
)
def test_a_missing_or_unreadable_manifest_is_told_and_the_checkpoint_before_is_taken(
    engine, finished, content
):
    manifest = finished / "manifest.json"
    manifest.unlink()
    if MANIFESTS[content] is not None:
        manifest.write_text(MANIFESTS[content])
    assert engine("resume", "r", "--strict").code == 4
    resumed = engine("resume", "r", "--steps", 3)
    assert resumed.code == 0, resumed.err
    assert f"{finished} is not usable: manifest.json" in resumed.err
    assert f"Resumed from {finished.with_name('step_00000001')}" in resumed.err


def test_when_every_checkpoint_is_damaged_nothing_of_the_run_is_changed(engine, finished):
    for path in finished.parent.iterdir():
        flip_a_byte(path / "state.json")
    run = finished.parents[1]
    before = (run / "metrics.jsonl").read_text(), sorted(os.listdir(run / "rollouts"))
    resumed = engine("resume", "r")
    assert resumed.code == 4
    assert "No usable checkpoint" in resumed.err
    assert ((run / "metrics.jsonl").read_text(), sorted(os.listdir(run / "rollouts"))) == before


def test_a_latest_that_points_nowhere_is_told(engine, finished):
    shutil.rmtree(finished.parents[1])
    assert (engine.folder / "runs" / "latest").is_symlink()
    for command in (["resume", "latest"], ["report", "latest"], ["prune", "latest"]):
        run = engine(*command)
        assert run.code == 4
        assert "No run at 'latest'" in run.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_checkpoint_that_may_not_be_read_is_told_and_the_one_before_is_taken(engine, finished):
    (finished / "state.json").chmod(0)
    resumed = engine("resume", "r", "--steps", 3)
    assert resumed.code == 0, resumed.err
    assert "cannot be read (Permission denied)" in resumed.err


def test_a_cut_last_line_of_the_metrics_is_left_out(engine, finished, metrics):
    file = finished.parents[1] / "metrics.jsonl"
    with file.open("a") as stream:
        stream.write('{"step": 3, "rewa')
    assert engine("resume", "r", "--steps", 3).code == 0
    assert [line["step"] for line in metrics()] == [1, 2, 3]
    assert all(json.dumps(line) for line in metrics())


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning_and_the_new_one_counts(
    engine, tiny, straight, result
):
    changes = {"checkpoint.keep_last": 1}
    run = engine("train", tiny(changes), env={"ENGINE_FAULT": "checkpoint.in_prune@2:ioerror"})
    assert run.code == 0, run.err
    assert "could not be deleted" in run.err
    assert result() == straight(changes)
    assert "step_00000004" in checkpoints(engine)
    assert engine("prune", "r").code == 0
    assert checkpoints(engine) == ["step_00000004"]


GARBLED = ["\0" * 40, '{"step": 2, "loss', "3", '{"loss": 1}']


def test_lines_of_the_metrics_that_a_power_failure_garbled_are_left_out_with_a_warning(
    engine, finished, metrics, straight, result
):
    file = finished.parents[1] / "metrics.jsonl"
    first, second = file.read_text().splitlines()
    file.write_text("\n".join([first, *GARBLED, second, "\0" * 9]) + "\n")
    resumed = engine("resume", "r", "--steps", 3)
    assert resumed.code == 0, resumed.err
    assert f"{len(GARBLED) + 1} lines of {file} cannot be read and are left out." in resumed.err
    assert result() == straight({"run.steps": 3})
