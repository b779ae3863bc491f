"""Row 33: the same seed gives the same run, whoever helps (CPU; more than one rank needs another runtime)."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.chaos

RUN = {"run.steps": 4, "eval.every_steps": 2, "algorithm.mini_batch_prompts": 2}
DRAWS = '''
import random
import numpy
from engine_core.specs import Stage


def draws(rollouts, step):
    """A stage of a user that draws from the global generators."""
    return rollouts, {"python": random.random(), "numpy": float(numpy.random.rand())}


@hookimpl
def engine_stages():
    return {"draws": Stage(load=draws)}
'''
REWARD = '[[reward]]\nname = "bytes_share"\nworkers = {workers}\n'


def test_the_same_seed_gives_the_same_run_bit_for_bit_and_another_seed_another(
    engine, tiny, straight, result
):
    run = engine("train", tiny(RUN))
    assert run.code == 0, run.err
    assert result() == straight(RUN)
    assert straight(RUN | {"run.seed": 1})["metrics"] != result()["metrics"]


@pytest.mark.slow
def test_a_process_with_other_hash_seeds_gives_the_same_run(engine, tiny, straight, result):
    """Not forked: an interpreter of its own, as a user starts it."""
    path = tiny(RUN)
    command = [sys.executable, "-m", "engine_core.cli.main", "train", str(path)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
    environment = plain | {"PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "1", "TZ": "Asia/Kathmandu"}
    subprocess.run(command, cwd=engine.folder, env=environment, check=True, capture_output=True, timeout=240)
    assert result() == straight(RUN)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_stopped_and_resumed_is_the_straight_run_whatever_draws_random_numbers(
    engine, tiny, tiny_plugin, straight, result, stop
):
    files = {
        "reward": REWARD.format(workers=0) + '[[stage]]\nname = "draws"\n',
        "plugin": tiny_plugin + DRAWS,
    }
    run = engine("train", tiny(RUN | {"run.steps": stop}, **files))
    assert run.code == 0, run.err
    assert engine("resume", "r", "--steps", 4).code == 0
    expected = straight(RUN, **files)
    assert result()["metrics"] == expected["metrics"]
    assert result()["files"] == expected["files"]
    assert len({line["stage/draws/python"] for line in expected["metrics"]}) == 4


def test_reward_workers_that_answer_in_another_order_change_nothing(engine, tiny, straight, result):
    shaken = """
import random
import time
from engine_core import hookimpl
from engine_core.specs import Reward


def bytes_share(completion):
    time.sleep(random.random() * SHAKE)
    return sum(c.isascii() for c in completion) / max(len(completion), 1)


@hookimpl
def engine_rewards():
    return {"bytes_share": Reward(load=bytes_share)}
"""
    plain = shaken.replace("SHAKE", "0.0")
    run = engine("train", tiny(RUN, reward=REWARD.format(workers=3), plugin=shaken.replace("SHAKE", "0.05")))
    assert run.code == 0, run.err
    expected = straight(RUN, reward=REWARD.format(workers=0), plugin=plain)
    assert [without_restarts(line) for line in result()["metrics"]] == [
        without_restarts(line) for line in expected["metrics"]
    ]
    assert (result()["samples"], result()["files"]) == (expected["samples"], expected["files"])


def without_restarts(line):
    return {name: value for name, value in line.items() if not name.endswith("/restarts")}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_data_workers_change_nothing(engine, tiny, straight, result, workers):
    run = engine("train", tiny(RUN | {"data.num_workers": workers}))
    assert run.code == 0, run.err
    assert result() == straight(RUN)
