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


HARMFUL = """
import time
from engine_core import hookimpl
from engine_core.specs import Environment


def sleeps():
    time.sleep(60)


def fails():
    raise ZeroDivisionError("by zero")


async def failing(episode):
    for tool in (sleeps, fails):
        turn = await episode.sample(max_tokens=1)
        episode.append(await episode.call(tool))
    return episode.rollout({"length": float(len(turn.text))})


async def blocks(episode):
    await episode.sample()
    if episode.prompt.id == "train:5":
        time.sleep(20)  # not awaited
    return episode.rollout({"length": 1.0})


async def forges(episode):
    await episode.sample()
    made = episode.rollout({"length": 1.0})
    if episode.prompt.id == "train:5":
        made.rollout_log_probs[made.loss_mask] += 0.1
    return made


@hookimpl
def engine_environments():
    names = frozenset({"length"})
    return {each.__name__: Environment(load=each, rewards=names) for each in (failing, blocks, forges)}
"""
IN_ORDER = {"data.shuffle": False, "run.steps": 3, "checkpoint.every_steps": 1}  # train:5 is in step 2


def test_the_policy_receives_what_its_tools_failed_of_and_the_run_continues(engine, tiny, metrics):
    table = '[environment]\nname = "failing"\ntool_timeout_seconds = 0.2\n'
    changes = {"run.steps": 1, "rollout.max_response_tokens": 100, "rollout.group_size": 2}
    run = engine("train", tiny(changes, reward=table, plugin=HARMFUL))
    assert run.code == 0, run.err
    (line,) = metrics()
    assert (line["environment/tool_calls"], line["environment/errors"]) == (16, 0)
    assert (line["environment/tool_timeouts"], line["environment/tool_errors"]) == (8, 8)
    shown = engine("inspect", "rollouts", "r", "--step", "1", "--limit", "1").out
    assert "no answer after 0.2 s" in shown
    assert "ZeroDivisionError: by zero" in shown


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        pytest.param(
            "blocks",
            6,
            "environment 'blocks' has blocked the event loop for 0.5 s",
            marks=pytest.mark.slow,
        ),
        ("forges", 3, "gave turn 1 log-probs that are not those"),
    ],
    ids=["blocks", "forges"],
)
def test_an_environment_that_blocks_or_forges_ends_the_run_with_its_line_and_a_resume_loses_nothing(
    engine, tiny, metrics, name, code, said
):
    table = f'[environment]\nname = "{name}"\ntimeout_seconds = 0.5\n'
    run = engine("train", tiny(IN_ORDER, reward=table, plugin=HARMFUL))
    assert run.code == code, run.err
    assert said in run.err
    assert "tiny.py" in run.err
    assert ("in blocks: time.sleep(20)" in run.err) == (name == "blocks")
    assert "Traceback" not in run.err
    assert "The newest checkpoint is of step 1. Resume: engine resume" in run.err
    (engine.folder / "tiny.py").write_text(HARMFUL.replace('== "train:5"', "is None"))
    resumed = engine("resume", "r")
    assert resumed.code == 0, resumed.err
    assert [line["step"] for line in metrics()] == [1, 2, 3]
