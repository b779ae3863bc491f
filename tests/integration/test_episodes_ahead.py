"""Episodes with slow tools under the drivers of single responses: run ahead, over-sampled, with turn timeouts."""

import json

import pytest

from engine_core import load_config
from engine_core.runs.rollout_files import read_rollouts
from engine_core.train.trainer import Trainer
from engine_core.train.update import fresh_gap
from engine_plugin_trainers.async_trainer import AsyncTrainer

pytestmark = pytest.mark.usefixtures("forked_workers")

PLUGIN = '''
import asyncio

from engine_core import hookimpl
from engine_core.specs import Environment


async def wait(seconds):
    await asyncio.sleep(seconds)
    return "."


async def slow(episode):
    """Twenty turns; the tools of every other prompt take ten times as long."""
    seconds = 0.002 if int(episode.prompt.id.rpartition(":")[2]) % 2 else 0.02
    while episode.goes_on:
        turn = await episode.sample(max_tokens=2)
        if episode.goes_on:
            episode.append(await episode.call(wait, seconds))
    return episode.rollout({"short": float(len(turn.text) < 2), "turns": len(episode.policy.turns)})


@hookimpl
def engine_environments():
    return {"slow": Environment(load=slow, rewards=frozenset({"short", "turns"}))}
'''
LENGTH = {"name": "length", "workers": 1, "length": {"max_tokens": 80, "buffer_tokens": 4}}


@pytest.fixture
def run(grpo, tmp_path):
    """``run(kind, changes)``: lines and rollouts of each step."""
    (tmp_path / "slow.py").write_text(PLUGIN)

    def run(kind, changes):
        settings = {
            **grpo,
            "plugins": [str(tmp_path / "slow.py")],
            "environment": {"name": "slow", "reward_weights": {"turns": 0.0}, "max_turns": 20},
            "model.override": {"max_position_embeddings": 256},
            "reward": [LENGTH],
            "rollout.hf.tokens_per_step": 1,
            "tracking.rollouts_every_steps": 1,
            "checkpoint.at_end": False,
            "run.steps": 4,
            **changes,
        }
        trainer = kind(load_config(settings, allow_code=True))
        trainer.train()
        trainer.close()
        lines = [
            json.loads(line) for line in (trainer.folder.path / "metrics.jsonl").read_text().splitlines()
        ]
        return lines, [read_rollouts(trainer.folder.rollout_file(line["step"])) for line in lines]

    return run


def whole(rollouts):
    """Whether a rollout has all its turns, each of versions that never fall, and the rewards of its episode."""
    for rollout in rollouts:
        versions = rollout.policy_versions[rollout.loss_mask].tolist()
        assert versions == sorted(versions)
        assert [m["role"] for m in rollout.messages] == (["assistant", "tool"] * 20)[:-1]
        assert rollout.rewards["turns"] == 20.0
        assert set(rollout.rewards) == {"length", "short", "turns"}
    return True


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("keep", "own"),
        *(pytest.param(how, "own", marks=pytest.mark.slow) for how in ("abort", "drain")),
        *(pytest.param(how, "process", marks=pytest.mark.slow) for how in ("keep", "abort", "drain")),
    ],
)
def test_twenty_turns_run_ahead_across_new_weights(run, how, where):
    places = {"own": {"rollout.weights": "own"}, "process": {"rollout.process": {}}}
    ahead = {"trainer": "async", "async.max_staleness": 2, "async.weight_updates": how, "run.steps": 5}
    lines, steps = run(AsyncTrainer, ahead | places[where] | {"eval.at_end": True})
    ids = [rollout.request_id for rollouts in steps for rollout in rollouts]
    assert sorted(ids) == sorted(f"{s}:{g}:{i}" for s in range(1, 6) for g in range(4) for i in range(4))
    for line, rollouts in zip(lines, steps, strict=True):
        assert whole(rollouts)
        assert line["async/staleness_max"] <= 2
        # tokens whose version is that of the present weights were sampled with them
        assert fresh_gap(line) < 1e-4
    assert max(line["async/mixed_version_share"] for line in lines) > 0  # episodes survived new weights
    assert sum(line["environment/tool_calls"] for line in lines) == 80 * 19  # the evaluation apart


@pytest.mark.parametrize("carried", [False, True])
def test_over_sampled_episodes_end_a_step_without_its_stragglers(run, carried):
    early = {"rollout.over_sampling": 2.0, "rollout.partial_rollouts": carried, "rollout.weights": "own"}
    lines, steps = run(Trainer, early | {"run.steps": 3})
    for line, rollouts in zip(lines, steps, strict=True):
        assert len(rollouts) == 16
        assert whole(rollouts)
        assert line["sampling/stopped"] > 0
        assert line["mismatch/max_abs"] < 1e-4 or carried
    stopped = sum(line["sampling/stopped"] for line in lines[:-1])
    resumed = sum(line["sampling/resumed_groups"] for line in lines)
    assert stopped > 0
    assert (resumed > 0) == carried


def test_a_turn_out_of_time_drops_its_episode_and_the_run_continues(run):
    short = {"rollout.request_timeout_seconds": 1e-6, "environment.max_failure_share": 1.0, "run.steps": 2}
    lines, steps = run(Trainer, short | {"environment.on_timeout": "zero"})
    assert [line["environment/timeouts"] for line in lines] == [16.0, 16.0]
    assert all(rollout.failure == "timeout" and rollout.reward == 0 for step in steps for rollout in step)
    assert "sampling/timeouts" not in lines[0]
