"""Episodes and existing agents of twenty turns that run ahead: kills of the run and of its sampler lose and repeat no episode."""

import re
import shutil
import signal
import zlib

import pytest

from engine_core.runs.rollout_files import read_rollouts
from engine_core.train.update import fresh_gap

pytestmark = pytest.mark.chaos

PLUGIN = """
import asyncio
import os
import signal
import zlib
from pathlib import Path

import aiohttp

from engine_core import hookimpl
from engine_plugin_agents import endpoint
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


async def agent(row, base_url, api_key):
    messages, heard = [{"role": "user", "content": row["prompt"]}], ""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        for number in range(20):
            body = {"messages": messages, "max_tokens": 2}
            async with client.post(base_url + "/chat/completions", json=body) as found:
                message = (await found.json())["choices"][0]["message"]
            heard += message["content"] + "|"
            messages += [message, {"role": "user", "content": "."}]
            await asyncio.sleep(0.002)
    return {"length": float(zlib.crc32(heard.encode()) % 1000)}


class Fragile(HFRolloutEngine):
    def step(self):
        if self.version == 1 and not (FOLDER / "died").exists():
            (FOLDER / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


@hookimpl
def engine_environments():
    names = frozenset({"length"})
    plays = {"slow": slow, "agent": endpoint(agent)}
    return {name: Environment(load=load, rewards=names) for name, load in plays.items()}


@hookimpl
def engine_rollout_engines():
    return {"fragile": RolloutBackend(load=Fragile, config=HFOptions, capabilities=frozenset({"pause"}))}
"""
TABLE = '[environment]\nname = "{}"\nmax_turns = 20\n'
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
        assert fresh_gap(line) < 1e-4
    return samples


def whole_conversations(folder):
    """Check that each agent has heard the twenty turns that its rollout holds, each once, in their order."""
    for file in (folder / "runs" / "r" / "rollouts").glob("*.parquet"):
        for rollout in read_rollouts(file):
            said = [message["content"] for message in rollout.messages if message["role"] == "assistant"]
            heard = "".join(text.removesuffix("<pad>") + "|" for text in said)  # a special token at the end
            assert rollout.branches == []
            turns = rollout.extras["turns"][rollout.loss_mask].unique().tolist()
            assert turns == [*range(1, 21)]
            assert len(said) == 20
            assert rollout.rewards["length"] == zlib.crc32(heard.encode()) % 1000


@pytest.fixture
def chat_model(tiny_world, tmp_path):
    """The tiny model with a chat template that writes contents and ends alone."""
    folder = tmp_path / "chat"
    shutil.copytree(tiny_world / "model", folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
    return {"model.path": str(folder)}


@pytest.mark.parametrize(
    ("point", "name"),
    [
        ("step.train@3:kill", "slow"),
        pytest.param("step.generate@4:kill", "slow", marks=pytest.mark.slow),
        pytest.param("step.sync@3:kill", "slow", marks=pytest.mark.slow),
        pytest.param("step.train@3:kill", "agent", marks=pytest.mark.slow),
        pytest.param("step.sync@3:kill", "agent", marks=pytest.mark.slow),
    ],
)
def test_a_kill_loses_no_episode_and_those_that_had_ended_are_kept(
    engine, tiny, result, point, name, chat_model, tmp_path
):
    settings = tiny({**RUN, **chat_model}, reward=TABLE.format(name), plugin=PLUGIN)
    assert engine("train", settings, env={"ENGINE_FAULT": point}).code == -signal.SIGKILL
    run = engine("resume", "r")
    kept, again = map(int, re.search(r"prompts (\d+) responses are restored, (\d+) are", run.err).groups())
    audit(run, result())
    resampled = [line["async/resampled"] for line in result()["metrics"]]
    assert sum(resampled) == again
    assert kept + again in (8, 16)  # two responses each of the prompts of one or two steps
    if name == "agent":
        whole_conversations(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slow", "agent"])
def test_a_sampler_that_is_killed_in_mid_episode_is_replaced(
    engine, tiny, result, tmp_path, name, chat_model
):
    changes = {key: value for key, value in RUN.items() if not key.startswith("rollout.")}
    changes |= {"rollout.process": {}, "rollout.backend": "fragile", **chat_model}
    run = engine("train", tiny(changes, reward=TABLE.format(name), plugin=PLUGIN))
    assert "Lost worker rollout[0] on" in run.err
    assert (tmp_path / "died").exists()
    audit(run, result())
    if name == "agent":
        whole_conversations(tmp_path)
