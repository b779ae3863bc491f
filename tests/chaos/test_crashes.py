"""Rows 1 and 2: a run killed at any instant goes on from its last checkpoint as if nothing had happened."""

import random
import signal
import time

import pytest
from variants import variants

from engine_plugin_testing.faults import POINTS

pytestmark = pytest.mark.chaos

RUN = {
    "run.steps": 5,
    "algorithm.mini_batch_prompts": 2,
    "actor.optim.schedule": "cosine",
    "eval.every_steps": 2,
    "checkpoint.every_steps": 2,
    "checkpoint.keep_last": 1,
}
"""Two updates a step, an evaluation and a save every second one, and each save deletes the one before."""

OF_A_SAVE = [point for point in POINTS if point.startswith("checkpoint.")]
OF_A_STEP = [point for point in POINTS if point.startswith("step.")]
QUICK = {
    "checkpoint.in_manifest",
    "checkpoint.before_publish",
    "checkpoint.after_publish",
    "checkpoint.in_prune",
    "step.reward",
    "step.after_backward",
    "step.after_update",
    "step.before_metrics",
}
"""One point for each state that a kill may leave behind; the others only in ``make test-full``."""
BEFORE_PUBLICATION = OF_A_SAVE[: OF_A_SAVE.index("checkpoint.after_publish")]


def killed_at(engine, tiny, point):
    """A run that is killed at a point of its second save or of the step before it."""
    passes = {"checkpoint.in_prune": 1, "step.eval": 2, "step.after_backward": 8, "step.after_update": 8}
    nth = passes.get(point, 2 if point in OF_A_SAVE else 4)
    run = engine("train", tiny(RUN), env={"ENGINE_FAULT": f"{point}@{nth}:kill"})
    assert run.code == -signal.SIGKILL, run.err
    return run


@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=[] if p in QUICK else pytest.mark.slow) for p in OF_A_SAVE + OF_A_STEP],
)
def test_a_run_killed_at_any_point_ends_as_the_uninterrupted_one_bit_for_bit(
    engine, tiny, straight, result, point
):
    killed_at(engine, tiny, point)
    resumed = engine("resume", "r")
    assert resumed.code == 0, resumed.err
    expected = 4 if point in OF_A_SAVE and point not in BEFORE_PUBLICATION else 2
    assert f"Resumed from {engine.folder}/runs/r/checkpoints/step_{expected:08d}" in resumed.err
    assert result() == straight(RUN)


REPLAYED = RUN | {"stage": [{"name": "replay_cache", "replay_cache": {"size": 7, "max_staleness": 3}}]}


@pytest.mark.parametrize(
    "point",
    variants(("checkpoint.after_role@2", "checkpoint.before_publish@2", "step.train@4"), ("step.train@4",)),
)
def test_a_stage_that_remembers_loses_nothing_by_a_kill(engine, tiny, straight, result, point):
    assert engine("train", tiny(REPLAYED), env={"ENGINE_FAULT": f"{point}:kill"}).code == -signal.SIGKILL
    resumed = engine("resume", "r")
    assert resumed.code == 0, resumed.err
    expected = straight(REPLAYED)
    assert result() == expected
    assert "stages/replay_cache.parquet" in expected["files"]
    assert expected["metrics"][-1]["stage/replay_cache/share"] == 0.5


@pytest.mark.parametrize(
    "point", ["checkpoint.in_manifest", "checkpoint.before_publish", "checkpoint.in_prune"]
)
def test_what_a_killed_save_leaves_is_no_checkpoint_is_reported_and_pruned(engine, tiny, point):
    killed_at(engine, tiny, point)
    folder = engine.folder / "runs" / "r" / "checkpoints"
    (left,) = folder.glob(".step_*")
    shown = engine("prune", "r", "--dry-run")
    assert str(left) in shown.out
    assert left.exists()
    assert engine("prune", "r").code == 0
    assert not left.exists()
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("point", ["checkpoint.begin", "checkpoint.before_publish"])
def test_a_run_killed_in_its_first_save_has_nothing_to_resume_and_says_so(engine, tiny, point):
    run = engine("train", tiny(RUN), env={"ENGINE_FAULT": f"{point}:kill"})
    assert run.code == -signal.SIGKILL
    resumed = engine("resume", "r")
    assert resumed.code == 4
    assert "No usable checkpoint" in resumed.err
    assert "Traceback" not in resumed.err


@pytest.mark.parametrize("point", ["resume.before_rewind", "resume.in_rewind", "run.setup"])
def test_a_resume_that_is_killed_is_resumed(engine, tiny, straight, result, point):
    killed_at(engine, tiny, "step.train")
    again = engine("resume", "r", env={"ENGINE_FAULT": f"{point}:kill"})
    assert again.code == -signal.SIGKILL, again.err
    resumed = engine("resume", "r")
    assert resumed.code == 0, resumed.err
    assert result() == straight(RUN)


def test_a_run_killed_before_anything_was_built_leaves_nothing_that_stands_in_the_way(engine, tiny):
    run = engine("train", tiny(RUN), env={"ENGINE_FAULT": "run.setup:kill"})
    assert run.code == -signal.SIGKILL
    assert engine("resume", "r").code == 4
    assert engine("train", tiny(RUN | {"run.name": "again"})).code == 0


MANY = {"run.steps": 120, "checkpoint.every_steps": 3, "eval.every_steps": 7}


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "kills"), [(0, 8), (1, 20), (2, 20), (3, 20)])
def test_kills_at_random_moments_lose_no_sample_and_train_on_none_twice(
    engine, tiny, straight, result, seed, kills
):
    """One run, killed again and again; each attempt may live for some steps and a random part of the next."""
    moments = random.Random(seed)
    tiny(MANY)
    run = engine.start("train", "run.toml")
    for number in range(kills):
        steps = moments.randint(0, 10) if number else 4  # the first attempt reaches a checkpoint
        run.until(lambda run=run, steps=steps: run.err.count("reward ") >= steps, f"{steps} steps")
        time.sleep(moments.random() * 0.04)
        run.send(signal.SIGKILL)
        assert run.wait().code == -signal.SIGKILL
        assert run.orphans() == []
        run = engine.start("resume", "r")
    assert run.wait().code == 0, run.err
    expected = straight(MANY)
    trained = [[sample[:2] for sample in step] for step in result()["samples"].values()]
    assert trained == [[sample[:2] for sample in step] for step in expected["samples"].values()]
    assert result() == expected
