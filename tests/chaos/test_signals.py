"""Rows 7 and 8: a run that is told to stop saves what it has and ends; told twice, it ends at once."""

import signal
import time

import pytest

from engine_core.runs.checkpoint import Checkpoints

pytestmark = pytest.mark.chaos

RUN = {"run.steps": 5, "algorithm.mini_batch_prompts": 2, "eval.every_steps": 1, "checkpoint.every_steps": 2}
PHASES = {  # point and its pass, steps that are done when the signal comes
    "rollout": ("step.generate@3", 2),
    "reward": ("step.reward@3", 2),
    "log_probs": ("step.log_probs@3", 2),
    "train": ("step.train@3", 2),
    "between backward and update": ("step.after_backward@5", 3),
    "after the first of two updates": ("step.after_update@5", 3),
    "weight sync": ("step.sync@3", 3),
    "eval": ("step.eval@3", 3),
    "before the metrics": ("step.before_metrics@4", 3),
    "after the metrics": ("step.after_metrics@4", 3),
    "save": ("checkpoint.after_role@1", 2),
}
CODES = {"term": 75, "int": 130}
QUICK_PHASES = (
    "rollout",
    "reward",
    "between backward and update",
    "after the first of two updates",
    "eval",
    "save",
)
QUICK = {("rollout", "int"), *((phase, "term") for phase in QUICK_PHASES)}
EACH = [
    pytest.param(phase, action, marks=[] if (phase, action) in QUICK else pytest.mark.slow)
    for phase in PHASES
    for action in CODES
]


def newest(engine):
    return Checkpoints(engine.folder / "runs" / "r" / "checkpoints").steps()[-1]


def return_code(process):
    """As a shell tells it."""
    return 128 - process.code if process.code < 0 else process.code


@pytest.mark.parametrize(("phase", "action"), EACH)
def test_a_signal_stops_saves_and_the_resumed_run_is_the_straight_one(
    engine, tiny, straight, result, phase, action
):
    point, done = PHASES[phase]
    run = engine("train", tiny(RUN), env={"ENGINE_FAULT": f"{point}:{action}"})
    assert return_code(run) == CODES[action], run.err
    assert newest(engine) == done
    assert "Traceback" not in run.err
    resumed = engine("resume", "r")
    assert resumed.code == 0, resumed.err
    assert result() == straight(RUN)


def test_a_run_stopped_in_its_last_evaluation_is_complete_after_one_resume(engine, tiny, straight, result):
    run = engine("train", tiny(RUN), env={"ENGINE_FAULT": "step.eval@5:term"})
    assert return_code(run) == 75, run.err
    assert engine("resume", "r").code == 0
    assert result()["metrics"] == straight(RUN)["metrics"]
    again = engine("resume", "r")
    assert again.code == 0
    assert "Nothing to do: step 5 is done" in again.err


def test_a_benchmark_that_is_stopped_saves_nothing(engine, tiny):
    folders = {"ENGINE_FAULT": "step.generate@3:term", "TMPDIR": str(engine.folder)}
    run = engine("bench", "step", tiny(RUN), "--steps", "4", "--warmup", "0", env=folders)
    assert return_code(run) == 143, run.err
    assert "Stopped by SIGTERM; nothing new was saved." in run.err
    assert "Checkpoint:" not in run.err
    assert not list(engine.folder.rglob("step_*"))


SLOW = """
import pathlib
import time
from engine_core import hookimpl
from engine_core.specs import Reward


def slow(completion, answer):
    if pathlib.Path("hang").exists():
        pathlib.Path("hanging").touch()
        time.sleep(60)
    return float(len(completion))


@hookimpl
def engine_rewards():
    return {"slow": Reward(load=slow)}
"""
SLOW_REWARD = '[[reward]]\nname = "slow"\nworkers = 2\ntimeout_seconds = 120\n'


@pytest.fixture
def waiting(engine, tiny):
    """A run that has done a step or more and now waits for rewards that take a minute."""
    run = engine.start("train", tiny({"run.steps": 100000}, reward=SLOW_REWARD, plugin=SLOW))
    run.until(
        lambda: (engine.folder / "runs" / "r" / "metrics.jsonl").exists() and "step" in run.err, "a step"
    )
    run.until(lambda: list(engine.folder.glob("runs/r/checkpoints/step_*")), "a checkpoint")
    (engine.folder / "hang").touch()
    run.until((engine.folder / "hanging").exists, "a reward that hangs")
    return run


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)],
)
def test_a_signal_while_it_waits_for_rewards_does_not_wait_for_them(engine, waiting, metrics, number, code):
    before = len(metrics())
    waiting.send(number)
    waiting.wait(timeout=30)  # the rewards take a minute
    assert return_code(waiting) == code
    assert waiting.orphans() == []
    assert len(metrics()) == before == newest(engine)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_run_at_once_and_leaves_no_process(engine, tiny, number):
    changes = {"run.steps": 100000}
    hang = {
        "ENGINE_FAULT": "step.after_update@3:sleep=60"
    }  # where a first signal waits for the end of the step
    run = engine.start("train", tiny(changes, reward=SLOW_REWARD, plugin=SLOW), env=hang)
    run.until(lambda: len(list(engine.folder.glob("runs/r/checkpoints/step_*"))) == 2, "two steps")
    run.until(lambda: "sleeps at step.after_update" in run.err, "the update of the third")
    run.send(number)
    time.sleep(0.3)
    assert run.code is None
    run.send(number)
    run.wait(timeout=30)
    assert return_code(run) == 128 + number
    assert run.orphans() == []
    assert newest(engine) == 2


def test_a_signal_before_anything_is_to_be_saved_ends_with_the_codes_of_a_plain_program(engine, tiny):
    assert engine("train", tiny(RUN), env={"ENGINE_FAULT": "run.setup:term"}).code == 143
    interrupted = engine("train", tiny(RUN | {"run.name": "again"}), env={"ENGINE_FAULT": "run.setup:int"})
    assert return_code(interrupted) == 130
    assert "Traceback" not in interrupted.err


def test_the_workers_of_a_killed_run_end_by_themselves(engine, waiting):
    """SIGKILL cannot be handled: workers see that their pipe is closed, or their watchdog ends them."""
    idle = waiting.family()
    assert len(idle) == 2
    (engine.folder / "hang").unlink()
    waiting.send(signal.SIGKILL)
    waiting.wait()
    for worker in idle:
        worker.terminate()  # the sleep of a minute is the function's; its time-out would end it
    assert waiting.orphans() == []
