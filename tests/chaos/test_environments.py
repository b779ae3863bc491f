"""Environments that hang, raise and are stopped, in whole runs."""

import signal

import pytest

pytestmark = pytest.mark.chaos

PLUGIN = """
import pathlib
import time

from engine_core import hookimpl
from engine_core.specs import Environment


async def waits(episode):
    for _ in range(2):
        turn = await episode.sample()
        episode.append(await episode.call(tool, turn.text))
    return episode.rollout({"length": float(len(turn.text))})


def tool(text):
    if pathlib.Path("hang").exists():
        pathlib.Path("hanging").touch()
        time.sleep(60)
    return f"<{len(text)}>"


async def faulty(episode):
    turn = await episode.sample()
    if episode.prompt.id == "train:3":
        raise ConnectionError("the game server is gone")
    return episode.rollout({"length": float(len(turn.text))})


@hookimpl
def engine_environments():
    names = frozenset({"length"})
    return {"waits": Environment(load=waits, rewards=names), "faulty": Environment(load=faulty, rewards=names)}
"""
WAITS = '[environment]\nname = "waits"\ntool_timeout_seconds = 120\n[rollout.hf]\nbatch_size = 1\n'
RUN = {"run.steps": 4, "checkpoint.every_steps": 1}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_does_not_wait_for_tools_and_the_resumed_run_is_the_straight_one(
    engine, tiny, straight, result, number, code
):
    expected = straight(RUN, reward=WAITS, plugin=PLUGIN)
    run = engine.start("train", tiny(RUN, reward=WAITS, plugin=PLUGIN))
    run.until(lambda: list(engine.folder.glob("runs/r/checkpoints/step_*")), "a checkpoint")
    (engine.folder / "hang").touch()
    run.until((engine.folder / "hanging").exists, "a tool that hangs")
    run.send(number)
    run.wait(30)  # of 60 that the tool takes
    assert run.code in (code, -number), run.err
    assert "Traceback" not in run.err
    assert run.orphans() == []
    (engine.folder / "hang").unlink()
    resumed = engine("resume", "r")
    assert resumed.code == 0, resumed.err
    assert result() == expected


def test_episodes_that_raise_are_dropped_counted_and_kept_for_a_look(engine, tiny, metrics):
    faulty = '[environment]\nname = "faulty"\n'
    run = engine("train", tiny({"run.steps": 6}, reward=faulty, plugin=PLUGIN))
    assert run.code == 0, run.err
    assert sum(line["environment/errors"] for line in metrics()) == 2  # 24 prompts once, two responses each
    assert "ConnectionError: the game server is gone" in run.err
    shown = engine("inspect", "rollouts", "r", "--step", next(
        str(line["step"]) for line in metrics() if line["environment/errors"]
    ), "--limit", "100")  # fmt: skip
    assert shown.out.count("dropped, episode failed (error)") == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("on_error = 'fail'", 'environment.on_error = "fail"'),
        ("max_failure_share = 0.0", "environment.max_failure_share = 0 allows"),
    ],
)
def test_a_failure_that_may_not_be_ends_the_run_with_exit_code_6(engine, tiny, settings, said):
    faulty = f'[environment]\nname = "faulty"\n{settings}\n'
    run = engine("train", tiny({"run.steps": 6}, reward=faulty, plugin=PLUGIN))
    assert run.code == 6
    assert said in run.err
    assert run.err.count("Traceback") == 1  # of the environment, said once
    assert "engine_core/environments" not in run.err
