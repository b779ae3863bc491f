"""inspect rollouts, prune."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from engine_core.runs.tracking import RunFolder


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "runs"


@pytest.fixture
def finished(engine, rl_run, kept):
    """Return a run of two steps of GRPO: a copy of one that is trained once."""
    runs = rl_run.parent / "runs"
    if kept.exists():
        shutil.copytree(kept, runs, symlinks=True)
    else:
        assert engine("train", "rl.toml").code == 0
        shutil.copytree(runs, kept, symlinks=True)
    return runs / "first"


def test_rollouts_are_shown_with_prompt_response_and_rewards(engine, finished):
    answer = engine("inspect", "rollouts", "first", "--step", "1", "--limit", "2")
    [first] = json.loads(engine("inspect", "rollouts", "first", "--step", "1", "--limit", "1", "--json").out)
    lines = answer.out.splitlines()
    value = f"{first['reward']:g}"
    assert lines[0] == f"--- {first['prompt_id']} #0: reward {value} (digits {value})"
    assert lines[1] == first["prompt"]
    assert lines[2] == f">>> {first['response']}  [stop, 5 tokens]"
    assert lines[-1] == "--- 10 more; see --limit"


def test_the_newest_step_is_the_default(engine, finished):
    shown = engine("inspect", "rollouts", "first", "--json").out
    assert shown == engine("inspect", "rollouts", "first", "--step", "2", "--json").out
    assert shown != engine("inspect", "rollouts", "first", "--step", "1", "--json").out


def test_a_step_without_rollouts_says_which_there_are(engine, finished):
    answer = engine("inspect", "rollouts", "first", "--step", "7")
    assert answer.code == 4
    assert "step_000001.parquet to step_000002.parquet" in answer.err
    for file in (finished / "rollouts").glob("*.parquet"):
        file.unlink()
    answer = engine("inspect", "rollouts", "first")
    assert answer.code == 4
    assert (
        "holds no rollouts. They are written after every step that is a multiple of tracking.rollouts_every_steps, which is 1."
        in answer.err
    )


def test_prune_deletes_old_checkpoints_and_leftovers(engine, finished):
    checkpoints = finished / "checkpoints"
    (checkpoints / ".step_00000003.partial-1234").mkdir()
    expected = f"{checkpoints / 'step_00000001'}\n{checkpoints / '.step_00000003.partial-1234'}\n"
    assert engine("prune", "first", "--dry-run").out == expected
    assert len(list(checkpoints.iterdir())) == 3
    assert engine("prune", "first").out == expected
    assert [path.name for path in checkpoints.iterdir()] == ["step_00000002"]


def test_prune_leaves_a_link_alone_that_has_the_name_of_a_leftover(engine, finished, tmp_path):
    (tmp_path / "other").mkdir()
    link = finished / "checkpoints" / ".step_00000003.partial-1234"
    link.symlink_to(tmp_path / "other")
    answer = engine("prune", "first")
    assert answer.code == 0
    assert str(link) not in answer.out
    assert link.is_symlink()
    assert (tmp_path / "other").is_dir()


def test_prune_never_counts_a_damaged_checkpoint_as_kept(engine, finished):
    (finished / "checkpoints" / "step_00000002" / "state.json").write_text("{}")
    assert engine("prune", "first").out == ""
    assert (finished / "checkpoints" / "step_00000001").exists()


def test_prune_leaves_a_run_alone_that_is_at_work(engine, finished):
    with closing(RunFolder.open(finished)) as folder:
        folder.lock()
        answer = engine("prune", "first")
    assert answer.code == 5
    assert "is in use by process" in answer.err
    assert (finished / "checkpoints" / "step_00000001").exists()


def test_keep_must_leave_something(engine, finished):
    answer = engine("prune", "first", "--keep", "0")
    assert answer.code == 2
    assert "--keep" in answer.err


def test_metrics_of_the_first_and_last_step_are_shown_by_the_beginnings_of_their_names(engine, finished):
    lines = engine("inspect", "metrics", "first", "reward/mean", "actor/l").out.splitlines()
    recorded = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line.split() for line in lines] == [
        ["step", "1", "2"],
        ["actor/loss", *(f"{line['actor/loss']:.4g}" for line in recorded)],
        ["actor/lr", *(f"{line['actor/lr']:.4g}" for line in recorded)],
        ["reward/mean", *(f"{line['reward/mean']:.4g}" for line in recorded)],
    ]
    assert (
        engine("inspect", "metrics", "first", "--columns", "1").err == "1 of 2 steps. --columns shows more.\n"
    )
    shown = json.loads(engine("inspect", "metrics", "first", "reward/mean", "--columns", "1", "--json").out)
    assert shown == [{"run": str(finished), "step": 2, "reward/mean": recorded[1]["reward/mean"]}]
    answer = engine("inspect", "metrics", "first", "reward/meen")
    assert answer.code == 4
    assert "Did you mean 'reward/mean'?" in answer.err


def test_metrics_of_several_runs_are_shown_below_each_other(engine, finished, rl_run):
    keys = ("run.name=longer", "run.steps=3")
    assert engine("train", "rl.toml", *(word for key in keys for word in ("--set", key))).code == 0
    command = ("inspect", "metrics", "first", "--with", "longer", "reward/mean")
    ours, theirs = (
        [f"{line['reward/mean']:.4g}" for line in map(json.loads, file.read_text().splitlines())]
        for file in (finished / "metrics.jsonl", finished.parent / "longer" / "metrics.jsonl")
    )
    assert [line.split() for line in engine(*command).out.splitlines()] == [
        ["step", "run", "1", "2", "3"],
        ["reward/mean", "first", *ours, "-"],
        ["reward/mean", "longer", *theirs],
    ]
    last = json.loads(engine(*command, "--columns", "1", "--json").out)
    assert [(Path(each["run"]).name, each["step"], each["reward/mean"] is None) for each in last] == [
        ("first", 3, True),
        ("longer", 3, False),
    ]


def test_held_out_rollouts_are_shown_and_their_absence_is_explained(engine, finished, rl_run):
    answer = engine("inspect", "rollouts", "first", "--eval")
    assert answer.code == 4
    assert "Evaluated after the steps: none." in answer.err
    keys = ("run.name=held", "data.validation=rows.jsonl", "eval.every_steps=1")
    assert engine("train", "rl.toml", *(word for key in keys for word in ("--set", key))).code == 0
    for folder in (Path("runs/held/rollouts"), Path("runs/held/rollouts/eval")):
        (folder / "step_000009_good.parquet").touch()  # of the user
    assert len(json.loads(engine("inspect", "rollouts", "held", "--json").out)) > 2
    last = json.loads(engine("inspect", "rollouts", "held", "--eval", "--json").out)
    assert last == json.loads(engine("inspect", "rollouts", "held", "--eval", "--step", "2", "--json").out)
    assert len(last) == 2  # eval.max_prompts
    assert engine("inspect", "rollouts", "held", "--eval", "--step", "7").code == 4
