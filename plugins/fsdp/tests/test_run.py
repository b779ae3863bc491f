"""A whole run: two processes, sharded, against one process."""

import json
import subprocess
import sys

import pytest

from engine_plugin_testing import reference

pytestmark = pytest.mark.timeout(900)  # several whole runs, each of up to 250 s

RUN = """
[model]
path = "model"
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
[run]
steps = 3
[checkpoint]
every_steps = 2
"""
SHARDED = ["actor.backend=fsdp", "runtime.backend=torchrun", "runtime.torchrun.processes=2"]


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
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def train(folder, name, *settings):
    told = engine(
        folder, "train", "run.toml", *(w for s in (f"run.name={name}", *settings) for w in ("--set", s))
    )
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return told, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_two_sharded_processes_train_as_one(folder):
    _, alone = train(folder, "alone")
    told, both = train(folder, "both", *SHARDED)
    assert "sharding 'full' over 2 ranks" in told
    for one, two in zip(alone, both, strict=True):
        assert one["reward/mean"] == two["reward/mean"]
        for name in ("actor/loss", "actor/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_a_sharded_run_that_stopped_goes_on(folder):
    _, straight = train(folder, "straight", *SHARDED, "run.steps=4")
    train(folder, "stopped", *SHARDED, "run.steps=2")
    engine(folder, "resume", "runs/stopped", "--set", "run.steps=4")
    lines = (folder / "runs" / "stopped" / "metrics.jsonl").read_text().splitlines()
    resumed = [json.loads(line) for line in lines]
    for one, two in zip(straight, resumed, strict=True):
        assert one["actor/grad_norm"] == two["actor/grad_norm"]


@pytest.mark.slow
def test_a_run_moves_to_one_process_and_back_by_two_words(folder):
    _, straight = train(folder, "stayed", *SHARDED, "run.steps=6")
    train(folder, "moved", *SHARDED, "run.steps=2")
    alone, both = ["actor.backend=torch", "runtime.backend=local"], SHARDED[:2]
    for steps, words in ((4, alone), (6, both)):
        told = engine(
            folder,
            "resume",
            "runs/moved",
            *(w for word in (f"run.steps={steps}", *words) for w in ("--set", word)),
        )
        assert "another engine computes the same with other roundings" in told
    lines = (folder / "runs" / "moved" / "metrics.jsonl").read_text().splitlines()
    for one, two in zip(straight, [json.loads(line) for line in lines], strict=True):
        assert one["reward/mean"] == two["reward/mean"]
        for name in ("actor/loss", "actor/grad_norm", "actor/lr"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6)
