"""Rows 1-3, 7-9, 20, 21, 27 and 33 with several ranks: one dies, hangs or fails; the run is told to stop; its controller dies."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.chaos

HERE = Path(__file__).parent
FILES = [
    HERE / "hurt_plugin.py",
    HERE / "hurt_engines.py",
    HERE.parent / "conformance" / "data_parallel_engine.py",
]
RANKS = {
    "plugins": ["hurt_plugin.py"],
    "actor.backend": "hurt",
    "rollout.backend": "hurt",
    "runtime.backend": "torchrun",
    "runtime.torchrun.processes": 2,
    "run.steps": 3,
    "eval.every_steps": 2,
}
PATIENCE = 150  # seconds: two processes import torch


@pytest.fixture
def ranks(tiny, tmp_path):
    """Writes a run file of two ranks and ``hurt.json``; returns the run file."""

    def write(changes=None, hurt=None, folder=tmp_path):
        path = tiny({**RANKS, **(changes or {})}, folder=folder)
        lines = [line for line in path.read_text().splitlines() if line != 'plugins = ["tiny.py"]']
        path.write_text("\n".join(lines) + "\n")
        for file in FILES:
            shutil.copy(file, folder)
        if hurt:
            tell(folder, hurt)
        return path

    return write


@pytest.fixture
def straight_ranks(straight, ranks):
    """The result of the run of two ranks to which nothing happens; done once."""
    return lambda: straight(write=ranks, patience=PATIENCE)


def ended(process):
    process.wait(PATIENCE)
    assert process.orphans() == []
    return process


def return_code(process):
    return 128 - process.code if process.code < 0 else process.code


def lost(run, hurt, cause):
    """The run ended for this rank, and said so."""
    assert run.code == 6
    assert f"Lost worker {hurt[0]}[{hurt[1]}] on " in run.err
    assert cause in run.err
    assert f"last words of rank {hurt[1]}" in run.err
    assert "Traceback" not in run.err


def tell(folder, hurt):
    """Write ``hurt.json`` whole: ranks that run read it at any moment."""
    part = folder / "hurt.part"
    part.write_text(json.dumps(hurt))
    part.rename(folder / "hurt.json")


def hurt_later(engine, run, hurt):
    """Hurt a rank once there is a checkpoint."""
    run.until(lambda: list(engine.folder.glob("runs/r/checkpoints/step_*1")), "a checkpoint")
    tell(engine.folder, hurt)
    run.until((engine.folder / "done").exists, "the rank is hurt")


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_run_that_is_stopped_and_then_loses_a_rank_ends_as_the_straight_one(
    engine, ranks, result, straight_ranks, number, code
):
    run = engine.start("train", ranks())
    hurt_later(engine, run, ["rollout", 1, "sample", "sleep"])  # ten minutes
    run.send(number)
    ended(run)  # at once
    assert return_code(run) == code, run.err
    assert "Traceback" not in run.err
    hurt = ["actor", 1, "forward", "kill"]
    tell(engine.folder, hurt)
    ended(again := engine.start("resume", "r"))  # and does not wait for the deadline of an hour
    lost(again, hurt, "killed by SIGKILL")
    ended(resumed := engine.start("resume", "r"))
    assert resumed.code == 0, resumed.err
    assert result() == straight_ranks()


EACH = [
    (["rollout", 1, "sample", "kill"], "killed by SIGKILL"),
    (["actor", 0, "save", "kill"], "killed by SIGKILL"),
    (["actor", 1, "save", "exit"], "exited with status 7"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("hurt", "cause"), EACH, ids=["sampling", "saving", "exit"])
def test_a_rank_that_dies_ends_the_run_with_its_cause_and_a_resume_is_the_straight_run(
    engine, ranks, result, straight_ranks, hurt, cause
):
    run = engine.start("train", ranks())
    hurt_later(engine, run, hurt)
    lost(ended(run), hurt, cause)
    ended(resumed := engine.start("resume", "r"))
    assert resumed.code == 0, resumed.err
    assert result() == straight_ranks()


@pytest.mark.slow
def test_with_restarts_the_run_goes_on_by_itself(engine, ranks, result, straight_ranks):
    straight = straight_ranks()
    changes = {"runtime.torchrun.max_restarts": 1}
    run = engine.start("train", ranks(changes))
    hurt_later(engine, run, ["actor", 1, "forward", "kill"])
    ended(run)
    assert run.code == 0, run.err
    assert "with new workers (0 restarts left)" in run.err
    assert result() == straight


@pytest.mark.slow
def test_a_loss_before_the_first_checkpoint_ends_the_run_though_restarts_are_left(engine, ranks):
    changes = {"runtime.torchrun.max_restarts": 3}
    run = ended(engine.start("train", ranks(changes, hurt=["actor", 1, "forward", "kill"])))
    assert run.code == 6
    assert "Lost worker actor[1]" in run.err
    assert "with new workers" not in run.err


def test_a_rank_that_hangs_is_found_with_the_stacks_of_all_and_who_waits_for_whom(engine, ranks):
    # rank 1 sleeps before its backward pass, rank 0 waits for it in a collective
    changes = {"runtime.torchrun.stall_minutes": 0.1}
    run = ended(engine.start("train", ranks(changes, hurt=["actor", 1, "forward", "sleep"])))
    assert run.code == 6
    lost = next(line for line in run.err.splitlines() if "Lost worker actor[1]" in line)
    assert "no answer to 'forward_backward' within 0.1 minutes (runtime.torchrun.stall_minutes)" in lost
    assert "it is in hurt (" in lost
    assert "rank 0 waits for rank 1 in " in lost
    assert "Where every rank is:\nrank 0:\n" in run.err


@pytest.mark.slow
def test_an_error_of_one_rank_is_that_error_and_its_exit_code(engine, ranks):
    run = ended(engine.start("train", ranks(hurt=["actor", 1, "forward", "raise"])))
    assert run.code == 4  # a DataError
    assert "engine: the shard of rank 1 cannot be read" in run.err
    assert "Traceback" not in run.err


def workers(run):
    return [process for process in run.family() if "engine_core.runtime.worker" in process.cmdline()]


def test_workers_end_with_a_controller_that_is_killed(engine, ranks):
    run = engine.start("train", ranks(hurt=["rollout", 1, "sample", "sleep"]))
    run.until((engine.folder / "done").exists, "a rank at work that hangs")
    assert len(workers(run)) == 2
    run.send(signal.SIGKILL)
    run.wait()
    assert run.orphans() == []


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once_and_leaves_no_process(engine, ranks):
    run = engine.start("train", ranks(hurt=["actor", 1, "forward", "sleep"]))
    run.until((engine.folder / "done").exists, "a rank that hangs in its forward pass")
    run.send(signal.SIGTERM)
    time.sleep(0.5)
    assert run.code is None  # the ranks wait for each other: the first signal waits for them
    run.send(signal.SIGTERM)
    ended(run)
    assert return_code(run) == 143


@pytest.mark.slow
def test_two_runs_at_once_on_one_machine_do_not_meet(engine, ranks, result, straight_ranks):
    path = ranks()
    runs = [engine.start("train", path, "--set", f"run.name={name}") for name in ("r", "s")]
    assert [ended(run).code for run in runs] == [0, 0]
    straight = straight_ranks()
    assert result() == straight


@pytest.mark.slow
def test_a_backend_of_one_process_is_refused_on_two_with_its_keys(engine, ranks):
    run = ended(engine.start("train", ranks({"actor.backend": "torch"})))
    assert run.code == 2
    assert "actor.backend = 'torch' trains in one process, and the pool of 'actor' has 2" in run.err


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(engine, ranks, metrics):
    run = ended(engine.start("train", ranks(hurt=["actor", 1, "forward", "nan"])))
    assert run.code == 0, run.err
    assert [line["actor/skipped_steps"] for line in metrics()] == [1.0, 0.0, 0.0]
    assert run.err.count("Optimizer step skipped: the gradient norm of 'actor' is nan") == 1


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank_leaves_the_older_checkpoints(engine, ranks, result, straight_ranks):
    run = engine.start("train", ranks())
    hurt_later(engine, run, ["actor", 1, "save", "nospace"])
    ended(run)
    assert run.code == 6
    assert "No space left on device" in run.err
    ended(resumed := engine.start("resume", "r"))
    assert resumed.code == 0, resumed.err
    assert result() == straight_ranks()


@pytest.mark.slow
def test_a_run_of_two_ranks_is_resumed_on_one(engine, ranks, metrics):
    run = ended(engine.start("train", ranks({"run.steps": 1})))
    assert run.code == 0, run.err
    resumed = ended(engine.start("resume", "r", "--steps", "2", "--set", "runtime.torchrun.processes=1"))
    assert resumed.code == 0, resumed.err
    assert "runtime.torchrun.processes: 2 -> 1" in resumed.err
    assert [line["step"] for line in metrics()] == [1, 2]
