"""A small world for runs, and one Ray cluster for all tests of a session."""

import json
import os
import subprocess
import sys

import pytest

from engine_core import load_config
from engine_core.train.trainer import Trainer
from engine_plugin_testing import reference

DIGITS = """
from engine_core import hookimpl
from engine_core.specs import Reward


def digits(completions):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@hookimpl
def engine_rewards():
    return {"digits": Reward(load=digits)}
"""
ALONE = """
import json, sys
from engine_core import load_config
from engine_core.train.trainer import Trainer

trainer = Trainer(load_config(json.load(sys.stdin), allow_code=True))
try:
    trainer.train()
finally:
    trainer.close()
"""
TIMED = ("time", "throughput/", "memory/", "sync/")


@pytest.fixture(scope="session")
def cluster():
    """Start a cluster in this process; runs that name no address use it."""
    from engine_plugin_ray.cluster import Cluster

    made = Cluster("")
    made.start(cpus=4, gpus=0)
    yield made
    made.close()


@pytest.fixture
def no_cluster(monkeypatch):
    """Make this process appear to belong to no cluster, since another test may have started the session's."""
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Return a folder with ``model/`` and ``train.jsonl``."""
    made = tmp_path_factory.mktemp("world")
    reference.write_model(made / "model", {}, 0, True)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (made / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.fixture
def settings(world, tmp_path):
    """Return a GRPO run of two steps with a reference, in the form that ``load_config`` accepts."""
    (tmp_path / "digits.py").write_text(DIGITS)
    return {
        "plugins": [str(tmp_path / "digits.py")],
        "model.path": str(world / "model"),
        "data.train": str(world / "train.jsonl"),
        "data.prompts_per_step": 4,
        "rollout.group_size": 4,
        "rollout.max_response_tokens": 8,
        "actor.optim.lr": 1e-3,
        "algorithm.kl_coef": 0.1,
        "reward": [{"name": "digits", "workers": 0}],
        "run.dir": str(tmp_path / "runs"),
        "run.steps": 2,
        "checkpoint.every_steps": 1,
        "tracking.trackers": [],
    }


@pytest.fixture
def train(settings):
    """Return a function that trains a whole run.

    It returns the metrics without times, and the hashes of the files of the newest checkpoint.
    """

    def run(name, kind=Trainer, **changes):
        trainer = kind(load_config({**settings, "run.name": name, **changes}, allow_code=True))
        try:
            trainer.train()
        finally:
            trainer.close()
        return result_of(trainer.folder.path)

    return run


@pytest.fixture
def train_alone(settings, tmp_path):
    """Return ``train`` in a separate process that belongs to no cluster, so that the run starts one."""

    def run(name, **changes):
        given = json.dumps({**settings, "run.name": name, **changes})
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        done = subprocess.run(
            [sys.executable, "-c", ALONE], input=given, env=env, cwd=tmp_path, capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return result_of(tmp_path / "runs" / name)

    return run


def result_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    newest = max((folder / "checkpoints").glob("step_*"))
    files = json.loads((newest / "manifest.json").read_text())["files"]
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines],
        "files": {name: entry for name, entry in files.items() if name != "state.json"},
    }
