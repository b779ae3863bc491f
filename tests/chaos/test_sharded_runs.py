"""The same rows with an actor that is sharded over two ranks (`fsdp`), which write their shards in threads of their own."""

import json
import shutil
import signal

import pytest

pytestmark = pytest.mark.chaos

SHARDED = {"actor.backend": "hurt_fsdp"}  # the sampler uses the actor's gathered module


def checkpoints(engine):
    return sorted(path.name for path in (engine.folder / "runs" / "r" / "checkpoints").iterdir())


def test_a_gradient_that_is_not_finite_and_a_full_disk_on_one_rank_are_so_on_all_and_training_goes_on(
    engine, hurting, ranks, metrics
):
    hurts = [["actor", 1, "forward", "nan"], ["actor", 1, "half weights", "nospace"]]
    run = hurting.ended(engine.start("train", ranks(SHARDED, hurt=hurts)))
    assert run.code == 0, run.err
    assert [line["actor/skipped_steps"] for line in metrics()] == [1.0, 0.0, 0.0]
    assert run.err.count("Optimizer step skipped: the gradient norm of 'actor' is nan") == 1
    assert "Step 1 could not be saved: [Errno 28] No space left on device" in run.err
    assert checkpoints(engine) == ["step_00000002", "step_00000003"]
    assert {f"memory/{role}/rss_gib" for role in ("actor", "rollout")} <= metrics()[0].keys()


POINTS = ["save", "begin weights", "half weights", "begin optimizer", "half optimizer", "written"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ranks_that_are_killed_anywhere_in_a_save_or_a_step_lose_nothing(
    engine, hurting, ranks, result, straight_ranks
):
    """One run that is killed again and again, and goes on by itself from its last whole checkpoint."""
    hurts = [["actor", 1, point, "kill"] for point in POINTS]
    hurts += [  # in turns: what rank 0 still writes when rank 1 has written is not hurt in the same attempt
        ["actor", 1, "forward", "kill"],
        ["actor", 0, "half weights", "kill"],
        ["actor", 0, "step", "kill"],
    ]
    straight = straight_ranks(SHARDED)
    run = engine.start("train", ranks({**SHARDED, "runtime.torchrun.max_restarts": len(hurts)}))
    hurting.from_first_checkpoint(run, hurts)
    hurting.ended(run, times=1 + len(hurts))
    assert run.code == 0, run.err
    assert run.err.count("Lost worker") >= len(hurts)
    assert (engine.folder / "happened").read_text().splitlines() == [place for _, _, place, _ in hurts]
    assert result() == straight


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "point", ["checkpoint.after_role", "checkpoint.in_manifest", "checkpoint.after_publish"]
)
def test_a_controller_that_is_killed_in_a_save_leaves_no_worker_and_loses_nothing(
    engine, hurting, ranks, result, straight_ranks, point
):
    run = hurting.ended(engine.start("train", ranks(SHARDED), env={"ENGINE_FAULT": f"{point}@2:kill"}))
    assert run.code == -signal.SIGKILL, run.err
    resumed = hurting.ended(engine.start("resume", "r"))
    assert resumed.code == 0, resumed.err
    assert result() == straight_ranks(SHARDED)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_stopped_in_rollout_training_and_save_is_the_straight_one(
    engine, hurting, ranks, result, straight_ranks
):
    run = engine.start("train", ranks(SHARDED), env={"ENGINE_FAULT": "step.generate@2:term"})
    for stop in ("step.train:term", "checkpoint.after_role:term", None):
        hurting.ended(run)
        assert run.code == 75, run.err
        run = engine.start("resume", "r", env={"ENGINE_FAULT": stop} if stop else {})
    hurting.ended(run)
    assert run.code == 0, run.err
    assert result() == straight_ranks(SHARDED)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_damaged_shards_and_a_lost_manifest_are_named_and_the_checkpoint_before_is_taken(
    engine, hurting, ranks, result, straight_ranks
):
    """Newest: a flipped byte in the shard of one rank. Before it: no manifest. The first one is whole."""
    run = hurting.ended(engine.start("train", ranks({**SHARDED, "checkpoint.keep_last": 9})))
    assert run.code == 0, run.err
    folder = engine.folder / "runs" / "r" / "checkpoints"
    shard = folder / "step_00000003" / "actor" / "weights-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    (folder / "step_00000002" / "manifest.json").unlink()
    strict = hurting.ended(engine.start("resume", "r", "--strict"))
    assert strict.code == 4
    assert "actor/weights-00001-of-00002.safetensors" in strict.err
    resumed = hurting.ended(engine.start("resume", "r"))
    assert resumed.code == 0, resumed.err
    assert "step_00000002 is not usable: manifest.json" in resumed.err
    assert f"Resumed from {folder / 'step_00000001'}" in resumed.err
    assert result()["metrics"] == straight_ranks({**SHARDED, "checkpoint.keep_last": 9})["metrics"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_memory_on_one_rank_ends_the_run_with_advice_and_a_checkpoint_to_go_on_from(
    engine, hurting, ranks, result, straight_ranks
):
    run = engine.start("train", ranks(SHARDED))
    hurting.later(run, ["actor", 1, "forward", "oom"])
    hurting.ended(run)
    assert run.code == 5, run.err
    assert "Traceback" not in run.err
    assert "engine: Out of memory on rank 1 in step " in run.err
    assert "Lower actor.max_tokens_per_rank (now auto; the log says what it came to)" in run.err
    assert "Resume: engine resume" in run.err
    resumed = hurting.ended(engine.start("resume", "r"))
    assert resumed.code == 0, resumed.err
    assert result() == straight_ranks(SHARDED)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_that_hangs_in_a_sharded_step_is_found_and_named(engine, hurting, ranks):
    changes = {**SHARDED, "runtime.torchrun.command_timeout_minutes": 0.1}
    run = hurting.ended(engine.start("train", ranks(changes, hurt=["actor", 1, "forward", "sleep"])))
    assert run.code == 6
    lost = next(line for line in run.err.splitlines() if "Lost worker actor[1]" in line)
    assert "no answer to 'forward_backward' within 0.1 minutes" in lost
    assert "rank 0 waits for rank 1 in " in lost


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_seed_twice_is_the_same_to_the_bit_and_one_rank_gives_the_same_to_rounding(
    engine, hurting, ranks, result, straight_ranks, metrics
):
    run = hurting.ended(engine.start("train", ranks(SHARDED)))
    assert run.code == 0, run.err
    straight = straight_ranks(SHARDED)
    assert result() == straight
    one = {**SHARDED, "runtime.torchrun.processes": 1, "run.name": "one"}
    assert hurting.ended(engine.start("train", ranks(one))).code == 0
    alone = (engine.folder / "runs" / "one" / "metrics.jsonl").read_text().splitlines()
    for mine, theirs in zip(straight["metrics"], map(json.loads, alone), strict=True):
        for name in ("reward/mean", "tokens/generated", "actor/loss", "actor/grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_may_change_before_a_resume_and_what_may_not(
    engine, hurting, ranks, metrics, tiny_world, tmp_path
):
    """Another rate, another runtime and number of processes may; another model may not; nor may two go on at once."""
    path = ranks({**SHARDED, "run.steps": 2})
    assert hurting.ended(engine.start("train", path)).code == 0
    shutil.copytree(tiny_world / "model", tmp_path / "larger")
    config = json.loads((tmp_path / "larger" / "config.json").read_text())
    (tmp_path / "larger" / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    other = hurting.ended(
        engine.start("resume", "r", "--steps", "3", "--set", f"model.path={tmp_path / 'larger'}")
    )
    assert other.code == 2
    assert "model.path: the checkpoint was written with" in other.err
    again = ["--steps", "4", "--set", "actor.optim.lr=0.005", "--set", "runtime.backend=local"]
    run = engine.start("resume", "r", *again, env={"ENGINE_FAULT": "step.train:sleep=20"})
    run.until(lambda: "Resumed from" in run.err, "a step")
    second = hurting.ended(engine.start("resume", "r", "--steps", "4"))
    assert second.code == 5
    assert f"in use by process {run.pid}" in second.err
    hurting.ended(run)
    assert run.code == 0, run.err
    assert "actor.optim.lr: 0.01 -> 0.005 (allowed)" in run.err
    assert "runtime.backend: torchrun -> local (allowed)" in run.err
    assert [line["step"] for line in metrics()] == [1, 2, 3, 4]
    assert [line["actor/lr"] for line in metrics()] == [0.01, 0.01, 0.005, 0.005]
