"""A sampler in a process of its own, and rewards that are computed while it samples: the same run, bit for bit."""

import json

import pytest

from engine_core import load_config
from engine_core.runs.rollout_files import read_rollouts
from engine_core.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("forked_workers")

TIMED = ("time", "throughput/", "memory/", "sync/")
OWN = {"rollout.process": {}}
TORCHRUN = {"runtime.backend": "torchrun"}


@pytest.fixture(scope="module")
def train(world, tmp_path_factory):
    """``train("name", changes)``: metrics without times, and the samples, of a small run; each done once."""
    folder, done = tmp_path_factory.mktemp("apart"), {}

    def run(name, changes):
        if name not in done:
            settings = {
                "model.path": str(world / "model"),
                "data.train": str(world / "data" / "train.jsonl"),
                "data.prompts_per_step": 4,
                "rollout.group_size": 4,
                "rollout.max_response_tokens": 8,
                "rollout.hf.batch_size": 5,  # several parts a step
                "actor.optim.lr": 1e-3,
                "reward": [{"name": "numeric", "workers": 2}, {"name": "exact_match", "workers": 1}],
                "tracking.rollouts_every_steps": 1,
                "tracking.trackers": [],
                "run.dir": str(folder),
                "run.name": name,
                "run.steps": 2,
            }
            trainer = Trainer(load_config({**settings, **changes}, allow_code=True))
            trainer.train()
            trainer.close()
            done[name] = result_of(trainer.folder.path)
        return done[name]

    return run


def result_of(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = {
        file.name: [
            (
                r.request_id,
                r.token_ids.tolist(),
                r.rollout_log_probs.tolist(),
                r.policy_versions.tolist(),
                r.rewards,
            )
            for r in read_rollouts(file)
        ]
        for file in sorted((run / "rollouts").rglob("*.parquet"))
    }
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines],
        "samples": samples,
        "overlap": [line.get("time/reward_overlap") for line in lines],
    }


def same(one, other):
    assert one["metrics"] == other["metrics"]
    assert one["samples"] == other["samples"]
    assert len(one["metrics"]) == 2
    assert one["samples"]


def test_rewards_while_others_are_sampled_are_the_rewards_at_the_end(train):
    late, early = train("late", {"rollout.overlap_rewards": False}), train("early", {})
    same(late, early)
    assert late["overlap"] == [0.0, 0.0]
    assert min(early["overlap"]) > 0


def test_a_sampler_in_its_own_process_is_one_with_weights_of_its_own(train):
    same(train("copy", {"rollout.weights": "own"}), train("own", OWN))


@pytest.mark.slow
def test_so_do_workers_in_processes(train):
    found = train("torchrun", TORCHRUN)
    same(train("early", {}), found)
    assert min(found["overlap"]) > 0


@pytest.mark.slow
def test_so_does_a_sampler_in_its_own_process_beside_a_worker(train):
    same(train("copy", {"rollout.weights": "own"}), train("torchrun-own", TORCHRUN | OWN))
