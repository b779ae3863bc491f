"""Whole runs: two processes under ZeRO-3, stopped, and gone on with in one."""

import json
import subprocess
import sys

import pytest

from engine_plugin_testing import reference

RUN = """
[model]
path = "model"
[actor]
backend = "deepspeed"
[actor.deepspeed]
param_persistence_threshold = 0
[actor.optim]
lr = 1e-3
[rollout]
group_size = 4
max_response_tokens = 8
[[reward]]
name = "numeric"
[data]
train = "train.jsonl"
prompts_per_step = 4
[runtime]
backend = "torchrun"
[runtime.torchrun]
processes = 2
[checkpoint]
every_steps = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("run")
    reference.write_model(made / "model", {}, 0, True)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (made / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "run.toml").write_text(RUN)
    return made


def engine(folder, *arguments):
    command = [sys.executable, "-m", "engine_core.cli.main", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def lines(folder, name):
    text = (folder / "runs" / name / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_in_another_number_of_processes(folder):
    engine(folder, "train", "run.toml", "--set", "run.name=straight", "--set", "run.steps=4")
    engine(folder, "train", "run.toml", "--set", "run.name=stopped", "--set", "run.steps=2")
    alone = ("run.steps=4", "runtime.backend=local")
    engine(folder, "resume", "runs/stopped", *(word for setting in alone for word in ("--set", setting)))
    straight, resumed = lines(folder, "straight"), lines(folder, "stopped")
    assert len(straight) == len(resumed) == 4
    for one, two in zip(straight, resumed, strict=True):
        assert one["reward/mean"] == two["reward/mean"]
        for name in ("actor/loss", "actor/grad_norm", "actor/lr"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6)
