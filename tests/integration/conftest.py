"""A small world for whole runs: word problems, their tokenizer, and a random model of 40,000 parameters."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from engine_core import load_config
from engine_core.config.assemble import plugins_for
from engine_plugin_tools.demo import prepare

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Folder with ``data/{train,heldout}.jsonl`` and ``model/``."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "ROWS", {"sft": 64, "train": 64, "heldout": 8})
        prepare.prepare(folder)
    config = folder / "model" / "config.json"
    small = json.loads(config.read_text()) | {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "head_dim": 8,
    }
    config.write_text(json.dumps(small))
    return folder


@pytest.fixture
def grpo(world, tmp_path):
    """Settings of a two-step GRPO run in ``tmp_path``, as ``load_config`` takes them."""
    return {
        "model.path": str(world / "model"),
        "data.train": str(world / "data" / "train.jsonl"),
        "data.validation": str(world / "data" / "heldout.jsonl"),
        "data.prompts_per_step": 4,
        "rollout.group_size": 4,
        "rollout.max_response_tokens": 8,
        "actor.optim.lr": 1e-3,
        "run.dir": str(tmp_path / "runs"),
        "run.name": "r",
        "run.steps": 2,
        "tracking.trackers": [],
    }


@pytest.fixture
def trained():
    """What trains to the end with settings, as ``load_config`` takes them, and gives the run's folder."""

    def train(settings):
        config = load_config(settings, allow_code=True)
        trainer = plugins_for(config).resolve("trainers", config.trainer)(config)
        try:
            trainer.train()
        finally:
            trainer.close()
        return trainer.folder.path

    return train


DIGITS = """
from engine_core import hookimpl
from engine_core.specs import Reward


def digits(completions):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@hookimpl
def engine_rewards():
    return {"digits": Reward(load=digits)}
"""


@pytest.fixture(scope="session")
def digits_plugin(tmp_path_factory):
    """A plugin in one file with the reward ``digits``: the share of them in a response."""
    path = tmp_path_factory.mktemp("plugin") / "digits.py"
    path.write_text(DIGITS)
    return path


@pytest.fixture
def write_run(world, digits_plugin, tmp_path):
    """``run.toml`` and ``digits.py`` beside it, as several nodes see them: its text, completed with model and data; their folder."""

    def write(text):
        shutil.copy(digits_plugin, tmp_path)
        data = world / "data" / "train.jsonl"
        text += f'[model]\npath = "{world / "model"}"\n[data]\ntrain = "{data}"\nprompts_per_step = 4\n'
        (tmp_path / "run.toml").write_text(text)
        return tmp_path

    return write


SMALL = {
    "ENGINE__ROLLOUT__GROUP_SIZE": "2",
    "ENGINE__ROLLOUT__MAX_RESPONSE_TOKENS": "12",
    "ENGINE__EVAL__MAX_PROMPTS": "8",
}
"""Environment in which the examples' own files make small runs."""


@pytest.fixture(scope="session")
def run_demo():
    """``engine demo ...`` in ``root``, a copy of the repository's examples."""

    def run(root, *arguments, small=True):
        plain = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment = plain | (
            {"OMP_NUM_THREADS": "1"} | SMALL if small else {}
        )  # the real one has all cores
        command = [sys.executable, "-m", "engine_core.cli.main", "demo", *map(str, arguments)]
        seconds = 900 if small else None
        return subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )

    return run


@pytest.fixture(scope="session")
def demo(run_demo, tmp_path_factory, worker_id):
    """A folder with ``examples/`` and the ``demo/`` that a short run of the demo leaves, and what it printed.

    The first process of the tests that asks makes it for all.
    """
    shared = (
        tmp_path_factory.getbasetemp().parent if worker_id != "master" else tmp_path_factory.mktemp("demo")
    )
    root = shared / "demo-of-all"
    with FileLock(shared / "demo-of-all.lock"):
        if not (root / "printed.txt").exists():
            shutil.copytree(
                ROOT / "examples", root / "examples", ignore=shutil.ignore_patterns("__pycache__")
            )
            done = run_demo(root, "--sft-steps", 3, "--steps", 10)
            assert done.returncode == 0, done.stderr
            (root / "printed.txt").write_text(done.stdout)
    return root, (root / "printed.txt").read_text()


@pytest.fixture(scope="session")
def custom_model(tmp_path_factory):
    """A folder for ``sys.path`` in which the wheel of ``examples/custom_model`` is installed."""
    source, site = tmp_path_factory.mktemp("custom_model"), tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "examples" / "custom_model", source, dirs_exist_ok=True, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, capture_output=True)
    return site
