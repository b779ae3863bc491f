"""A run that samples ahead is killed, stopped, loses its sampler: every prompt is learned from once."""

import json
import os
import random
import signal
import time

import pytest

from engine_core.train.update import fresh_gap

pytestmark = pytest.mark.chaos

AHEAD = {
    "trainer": "async",
    "async.max_staleness": 2,
    "rollout.weights": "own",
    "rollout.hf.batch_size": 3,  # a step of the sampler is a part of a group
    "run.steps": 6,
    "checkpoint.every_steps": 2,
    "tracking.rollouts_every_steps": 1,
}
PATIENCE = 150  # seconds: a process imports torch


def expected(steps):
    """Request ids of a run, in the order of the data: P = 4, G = 2."""
    return [
        f"{step}:{group}:{index}" for step in range(1, steps + 1) for group in range(4) for index in (0, 1)
    ]


def audit(run, result, straight, steps):
    """What was learned from, over all attempts: each response of each prompt of the synchronous run once."""
    assert run.code == 0, run.err
    assert run.orphans() == []
    found = [sample[:2] for step in result["samples"].values() for sample in step]
    assert sorted(id for _, id in found) == sorted(expected(steps))
    prompts = {sample[1]: sample[0] for step in straight["samples"].values() for sample in step}
    assert all(prompts[id] == prompt for prompt, id in found)  # of the same rows
    assert [line["step"] for line in result["metrics"]] == list(range(1, steps + 1))
    assert all(line["async/staleness_max"] <= 2 for line in result["metrics"])


def sync(steps):
    return {"run.steps": steps, "tracking.rollouts_every_steps": 1, "checkpoint.every_steps": 0}


@pytest.mark.parametrize(
    "point",
    [
        "step.generate@4:kill",
        "step.train@4:kill",
        pytest.param("step.after_update@4:kill", marks=pytest.mark.slow),
        pytest.param("step.sync@5:kill", marks=pytest.mark.slow),
        pytest.param("checkpoint.before_manifest@2:kill", marks=pytest.mark.slow),
        pytest.param("checkpoint.after_publish@1:kill", marks=pytest.mark.slow),
    ],
)
def test_a_kill_loses_no_prompt_and_repeats_none(engine, tiny, straight, result, point):
    assert engine("train", tiny(AHEAD), env={"ENGINE_FAULT": point}).code == -signal.SIGKILL
    run = engine("resume", "r")
    assert "are sampled again" in run.err
    audit(run, result(), straight(sync(6)), 6)


@pytest.mark.parametrize(
    "point", ["step.generate@3:term", pytest.param("step.train@4:term", marks=pytest.mark.slow)]
)
def test_a_stop_saves_what_is_in_flight_as_to_be_sampled_again(engine, tiny, straight, result, point):
    stopped = engine("train", tiny(AHEAD), env={"ENGINE_FAULT": point})
    assert stopped.code == 75, stopped.err
    state = next((engine.folder / "runs/r/checkpoints").glob("step_*[23]/state.json"))
    ahead = json.loads(state.read_text())["trainer"]["ahead"]
    assert ahead["queue"]
    assert ahead["admitted"] == 4 * json.loads(state.read_text())["step"] + len(ahead["queue"])
    audit(engine("resume", "r"), result(), straight(sync(6)), 6)


@pytest.mark.parametrize(
    ("seed", "kills"), [(0, 3), *(pytest.param(seed, 12, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_kills_at_random_moments_lose_no_prompt_and_repeat_none(engine, tiny, straight, result, seed, kills):
    moments, steps = random.Random(seed), 12 * kills
    changes = AHEAD | {"run.steps": steps, "checkpoint.every_steps": 3}
    tiny(changes)
    run = engine.start("train", "run.toml")
    for number in range(kills):
        alive = moments.randint(0, 8) if number else 4  # the first attempt reaches a checkpoint
        run.until(lambda run=run, alive=alive: run.err.count("reward ") >= alive, f"{alive} steps")
        time.sleep(moments.random() * 0.05)
        run.send(signal.SIGKILL)
        assert run.wait().code == -signal.SIGKILL
        assert run.orphans() == []
        run = engine.start("resume", "r")
    audit(run.wait(PATIENCE), result(), straight(sync(steps)), steps)


def test_a_lower_staleness_after_a_resume_holds_from_there_on(engine, tiny, straight, result):
    assert engine("train", tiny(AHEAD), env={"ENGINE_FAULT": "step.train@4:kill"}).code == -signal.SIGKILL
    run = engine("resume", "r", "--set", "async.max_staleness=1")
    audit(run, result(), straight(sync(6)), 6)
    assert all(line["async/staleness_max"] <= 1 for line in result()["metrics"][2:])


@pytest.mark.slow
def test_a_resume_that_samples_nothing_ahead_loses_no_prompt(engine, tiny, straight, result):
    assert engine("train", tiny(AHEAD), env={"ENGINE_FAULT": "step.train@4:kill"}).code == -signal.SIGKILL
    run = engine("resume", "r", "--set", "async.max_staleness=0")
    assert run.code == 0, run.err

    def learned(samples):
        return sorted(sample[0] for step in samples.values() for sample in step)

    assert learned(result()["samples"]) == learned(straight(sync(6))["samples"])


FRAGILE = """
import os, signal, sys
from pathlib import Path
from engine_core.specs import RolloutBackend
from engine_plugin_hf_rollout.engine import HFRolloutEngine
from engine_plugin_hf_rollout.plugin import HFOptions

FOLDER = Path(__file__).parent


class Fragile(HFRolloutEngine):
    def step(self):
        if self.version == 1 and not (FOLDER / "died").exists():
            (FOLDER / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


@hookimpl
def engine_rollout_engines():
    return {"fragile": RolloutBackend(load=Fragile, config=HFOptions, capabilities=frozenset({"pause"}))}
"""


@pytest.mark.slow
def test_a_sampler_that_was_lost_comes_back_with_the_present_weights(
    engine, tiny, tiny_plugin, straight, result, tmp_path
):
    changes = {name: value for name, value in AHEAD.items() if not name.startswith("rollout.")}
    changes |= {"rollout.process": {}, "rollout.backend": "fragile"}
    run = engine.start("train", tiny(changes, plugin=tiny_plugin + FRAGILE)).wait(PATIENCE)
    assert "Lost worker rollout[0] on" in run.err
    assert (tmp_path / "died").exists()
    audit(run, result(), straight(sync(6)), 6)
    for line in result()["metrics"]:  # tokens that say they are of the present weights are
        assert fresh_gap(line) < 1e-4
    assert max(line["policy_version"] for line in result()["metrics"]) == 6


@pytest.mark.slow
def test_an_abort_of_what_is_sampled_loses_nothing_when_the_run_is_killed(engine, tiny, straight, result):
    changes = AHEAD | {"async.weight_updates": "abort"}
    point = "step.after_update@4:kill"
    assert engine("train", tiny(changes), env={"ENGINE_FAULT": point}).code == -signal.SIGKILL
    audit(engine("resume", "r"), result(), straight(sync(6)), 6)


def test_no_thread_holds_up_a_run_that_is_ended_at_once(engine, tiny):
    hang = {
        "ENGINE_FAULT": "step.after_update@3:sleep=60"
    }  # there a first signal waits for the end of the step
    run = engine.start("train", tiny(AHEAD | {"run.steps": 500}), env=hang)
    run.until(lambda: "sleeps at step.after_update" in run.err, "the update of the third step")
    run.send(signal.SIGINT)
    time.sleep(0.3)  # sooner, it would be the same stop
    assert run.code is None
    run.send(signal.SIGINT)
    began = os.times().elapsed
    assert run.wait().code in (130, -signal.SIGINT)
    assert run.orphans() == []
    assert os.times().elapsed - began < PATIENCE
