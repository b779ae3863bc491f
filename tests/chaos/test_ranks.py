"""Rows 1-3, 7-9, 20, 21, 27 and 33 with several ranks: one dies, hangs or fails; the run is told to stop; its controller dies."""

import os
import signal
import time

import pytest

from engine_core.temporary_folder import remove_abandoned

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), (signal.SIGINT, 130)],
)
@pytest.mark.slow
def test_a_run_that_is_stopped_and_then_loses_a_rank_ends_as_the_straight_one(
    engine, hurting, ranks, result, straight_ranks, number, code
):
    run = engine.start("train", ranks())
    hurting.later(run, ["rollout", 1, "sample", "sleep"])  # ten minutes
    run.send(number)
    hurting.ended(run)  # at once
    assert hurting.return_code(run) == code, run.err
    assert "Traceback" not in run.err
    hurt = ["actor", 1, "forward", "kill"]
    hurting.tell(hurt)
    hurting.ended(again := engine.start("resume", "r"))  # and does not wait for the deadline of an hour
    hurting.lost(again, hurt, "killed by SIGKILL")
    hurting.ended(resumed := engine.start("resume", "r"))
    assert resumed.code == 0, resumed.err
    assert result() == straight_ranks()


STOPPED_BEFORE_IT_WAITS = """
import os, signal, time
from pathlib import Path
from engine_plugin_processes.worker_pool import WorkerPool

send = WorkerPool.send

def send_and_be_stopped(crew, messages, what, *given, **named):
    reply = send(crew, messages, what, *given, **named)
    if what == ("rollout", "generate") and 1 in messages and Path("happened").exists():  # after the step
        while not Path("done").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    return reply

WorkerPool.send = send_and_be_stopped
"""


@pytest.mark.slow
def test_a_stop_between_a_call_and_the_wait_for_it_saves_the_step_while_a_rank_is_at_work(
    engine, hurting, ranks
):
    """Rank 1 samples for the evaluation of step 1 for ten minutes; the step is to be saved by it too."""
    path = ranks(
        {"eval.every_steps": 1}, hurt=[["actor", 1, "step", "nothing"], ["rollout", 1, "sample", "sleep"]]
    )
    hurting.ended(run := engine.start("train", path, prelude=STOPPED_BEFORE_IT_WAITS))
    assert run.code == 75, run.err
    assert "Stopped by SIGTERM after step 1" in run.err
    assert [file.name for file in hurting.folder.glob("runs/r/checkpoints/step_*")] == ["step_00000001"]


EACH = [
    (["rollout", 1, "sample", "kill"], "killed by SIGKILL"),
    (["actor", 0, "save", "kill"], "killed by SIGKILL"),
    (["actor", 1, "save", "exit"], "exited with status 7"),
    (["rollout", 1, "sample", "garbage"], "it sent something else than an answer"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("hurt", "cause"), EACH, ids=["sampling", "saving", "exit", "invalid bytes"])
def test_a_rank_that_dies_ends_the_run_with_its_cause_and_a_resume_is_the_straight_run(
    engine, hurting, ranks, result, straight_ranks, hurt, cause
):
    run = engine.start("train", ranks())
    hurting.later(run, hurt)
    hurting.lost(hurting.ended(run), hurt, cause)
    hurting.ended(resumed := engine.start("resume", "r"))
    assert resumed.code == 0, resumed.err
    assert result() == straight_ranks()


@pytest.mark.slow
def test_with_restarts_the_run_goes_on_by_itself(engine, hurting, ranks, result, straight_ranks):
    straight = straight_ranks()
    changes = {"runtime.torchrun.max_restarts": 1}
    run = engine.start("train", ranks(changes))
    hurting.later(run, ["actor", 1, "forward", "kill"])
    hurting.ended(run)
    assert run.code == 0, run.err
    assert "with new workers (0 restarts left)" in run.err
    assert result() == straight


@pytest.mark.slow
def test_a_loss_before_the_first_checkpoint_ends_the_run_though_restarts_are_left(engine, hurting, ranks):
    changes = {"runtime.torchrun.max_restarts": 3}
    run = hurting.ended(engine.start("train", ranks(changes, hurt=["actor", 1, "forward", "kill"])))
    assert run.code == 6
    assert "Lost worker actor[1]" in run.err
    assert "with new workers" not in run.err


def test_a_rank_that_hangs_is_found_with_the_stacks_of_all_and_who_waits_for_whom(engine, hurting, ranks):
    # rank 1 sleeps before its backward pass, rank 0 waits for it in a collective
    changes = {"runtime.torchrun.command_timeout_minutes": 0.1}
    run = hurting.ended(engine.start("train", ranks(changes, hurt=["actor", 1, "forward", "sleep"])))
    assert run.code == 6
    lost = next(line for line in run.err.splitlines() if "Lost worker actor[1]" in line)
    assert (
        "no answer to 'forward_backward' within 0.1 minutes (runtime.torchrun.command_timeout_minutes)"
        in lost
    )
    assert "it is in hurt (" in lost
    assert "rank 0 waits for rank 1 in " in lost
    assert "Where every rank is:\nrank 0:\n" in run.err


@pytest.mark.slow
def test_an_error_of_one_rank_is_that_error_and_its_exit_code(engine, hurting, ranks):
    run = hurting.ended(engine.start("train", ranks(hurt=["actor", 1, "forward", "raise"])))
    assert run.code == 4  # a DataError
    assert "engine: the shard of rank 1 cannot be read" in run.err
    assert "Traceback" not in run.err


def workers(run):
    return [process for process in run.family() if "engine_plugin_processes.worker" in process.cmdline()]


def test_workers_end_with_a_controller_that_is_killed(engine, hurting, ranks, tmp_path):
    (temporary := tmp_path / "temporary").mkdir()
    path = ranks(hurt=["rollout", 1, "sample", "sleep"])
    run = engine.start("train", path, prelude=f"import tempfile\ntempfile.tempdir = {str(temporary)!r}")
    run.until((engine.folder / "done").exists, "a rank at work that hangs")
    assert len(workers(run)) == 2
    assert list(temporary.glob("engine-*"))
    run.send(signal.SIGKILL)
    run.wait()
    assert run.orphans() == []
    for left in temporary.glob("engine-*"):
        os.utime(left, (0, 0))
    remove_abandoned(temporary)
    assert list(temporary.glob("engine-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_run_at_once_and_leaves_no_process(engine, hurting, ranks, number):
    run = engine.start("train", ranks(hurt=["actor", 1, "forward", "sleep"]))
    run.until((engine.folder / "done").exists, "a rank that hangs in its forward pass")
    run.send(number)
    time.sleep(0.5)
    assert run.code is None  # the ranks wait for each other: the first signal waits for them
    run.send(number)
    hurting.ended(run)
    assert hurting.return_code(run) == 128 + number


@pytest.mark.slow
def test_two_runs_at_once_on_one_machine_do_not_meet(engine, hurting, ranks, result, straight_ranks):
    path = ranks()
    runs = [engine.start("train", path, "--set", f"run.name={name}") for name in ("r", "s")]
    assert [hurting.ended(run).code for run in runs] == [0, 0]
    straight = straight_ranks()
    assert result() == straight


@pytest.mark.slow
def test_a_backend_of_one_process_is_refused_on_two_with_its_keys(engine, hurting, ranks):
    run = hurting.ended(engine.start("train", ranks({"actor.backend": "torch"})))
    assert run.code == 2
    assert "actor.backend = 'torch' trains in one process, and the pool of 'actor' has 2" in run.err


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(engine, hurting, ranks, metrics):
    run = hurting.ended(engine.start("train", ranks(hurt=["actor", 1, "forward", "nan"])))
    assert run.code == 0, run.err
    assert [line["actor/skipped_steps"] for line in metrics()] == [1.0, 0.0, 0.0]
    assert run.err.count("Optimizer step skipped: the gradient norm of 'actor' is nan") == 1


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank_fails_the_save_on_all_and_training_goes_on(
    engine, hurting, ranks, result, straight_ranks
):
    """Of an engine whose ranks wait for each other in a save."""
    run = engine.start("train", ranks())
    hurting.later(run, ["actor", 1, "save", "nospace"])
    hurting.ended(run)
    assert run.code == 0, run.err
    assert "could not be saved" in run.err
    assert result() == straight_ranks()


@pytest.mark.slow
def test_a_run_of_two_ranks_is_resumed_on_one(engine, hurting, ranks, metrics):
    run = hurting.ended(engine.start("train", ranks({"run.steps": 1})))
    assert run.code == 0, run.err
    resumed = hurting.ended(
        engine.start("resume", "r", "--steps", "2", "--set", "runtime.torchrun.processes=1")
    )
    assert resumed.code == 0, resumed.err
    assert "runtime.torchrun.processes: 2 -> 1" in resumed.err
    assert [line["step"] for line in metrics()] == [1, 2]
