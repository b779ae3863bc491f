"""Episodes of twenty turns that run ahead: kills of the run and of its sampler lose and repeat no episode."""

import re
import signal

import pytest

pytestmark = pytest.mark.chaos

PLUGIN = """
import asyncio
import os
import signal
from pathlib import Path

from engine_core import hookimpl
from engine_core.specs import Environment, RolloutBackend
from engine_plugin_hf_rollout.engine import HFRolloutEngine
from engine_plugin_hf_rollout.plugin import HFOptions

FOLDER = Path(__file__).parent


async def wait(seconds):
    await asyncio.sleep(seconds)
    return "."


async def slow(episode):
    seconds = 0.002 if int(episode.prompt.id.rpartition(":")[2]) % 2 else 0.03
    while episode.goes_on:
        turn = await episode.sample(max_tokens=2)
        if episode.goes_on:
            episode.append(await episode.call(wait, seconds))
    return episode.rollout({"length": float(len(turn.text))})


class Fragile(HFRolloutEngine):
    def step(self):
        if self.version == 1 and not (FOLDER / "died").exists():
            (FOLDER / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


@hookimpl
def engine_environments():
    return {"slow": Environment(load=slow, rewards=frozenset({"length"}))}


@hookimpl
def engine_rollout_engines():
    return {"fragile": RolloutBackend(load=Fragile, config=HFOptions, capabilities=frozenset({"pause"}))}
"""
SLOW = '[environment]\nname = "slow"\nmax_turns = 20\n'
RUN = {
    "trainer": "async",
    "async.max_staleness": 2,
    "rollout.weights": "own",
    "model.override.max_position_embeddings": 256,
    "run.steps": 6,
    "checkpoint.every_steps": 1,
    "tracking.rollouts_every_steps": 1,
}
STEPS = range(1, 7)


def audit(run, result):
    """Check that each episode was learned from once, whole and with its reward."""
    assert run.code == 0, run.err
    assert run.orphans() == []
    samples = [sample for step in result["samples"].values() for sample in step]
    assert sorted(s[1] for s in samples) == [f"{s}:{g}:{i}" for s in STEPS for g in range(4) for i in (0, 1)]
    assert [line["step"] for line in result["metrics"]] == [*STEPS]
    assert all(line["async/staleness_max"] <= 2 for line in result["metrics"])
    assert all(line["environment/errors"] == line["environment/timeouts"] == 0 for line in result["metrics"])
    for line in result["metrics"]:  # tokens of the present weights are of the present weights
        assert line.get("mismatch/fresh_mean_abs", line["mismatch/mean_abs"]) < 1e-4
    return samples


@pytest.mark.parametrize(
    "point",
    [
        "step.train@3:kill",
        pytest.param("step.generate@4:kill", marks=pytest.mark.slow),
        pytest.param("step.sync@3:kill", marks=pytest.mark.slow),
    ],
)
def test_a_kill_loses_no_episode_and_those_that_had_ended_are_kept(engine, tiny, result, point):
    settings = tiny(RUN, reward=SLOW, plugin=PLUGIN)
    assert engine("train", settings, env={"ENGINE_FAULT": point}).code == -signal.SIGKILL
    run = engine("resume", "r")
    kept, again = map(int, re.search(r"prompts (\d+) responses are restored, (\d+) are", run.err).groups())
    audit(run, result())
    resampled = [line["async/resampled"] for line in result()["metrics"]]
    assert sum(resampled) == again
    assert kept + again in (8, 16)  # two responses each of the prompts of one or two steps


@pytest.mark.slow
def test_a_sampler_that_is_killed_in_mid_episode_is_replaced(engine, tiny, result, tmp_path):
    changes = {name: value for name, value in RUN.items() if not name.startswith("rollout.")}
    changes |= {"rollout.process": {}, "rollout.backend": "fragile"}
    run = engine("train", tiny(changes, reward=SLOW, plugin=PLUGIN))
    assert "Lost worker rollout[0] on" in run.err
    assert (tmp_path / "died").exists()
    audit(run, result())
