"""Roles on different train engines in one run, and a run that goes on under another engine from exported weights."""

import json
import math
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from engine_plugin_testing import reference

RUN = """
[model]
path = "model"
[actor]
backend = "deepspeed"
max_tokens_per_rank = 128
[actor.deepspeed]
param_persistence_threshold = 0
[actor.optim]
lr = 1e-3
[critic]
backend = "fsdp"
[critic.optim]
lr = 1e-3
[ref]
backend = "torch"
[rollout]
group_size = 4
max_response_tokens = 8
[algorithm]
advantage = "gae"
kl_coef = 0.05
[data]
train = "train.jsonl"
prompts_per_step = 4
[[reward]]
name = "numeric"
[[reward]]
name = "learned"
[reward.model]
path = "scorer"
backend = "torch"
[runtime]
backend = "torchrun"
[placement]
pools = { train = 2, frozen = 1 }
actor = "train"
rollout = "train"
ref = "frozen"
reward = "frozen"
[checkpoint]
every_steps = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mixed")
    reference.write_model(made / "model", {}, 0, True)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(made / "model", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(made / "scorer")
    for file in (made / "model").glob("tokenizer*"):
        shutil.copy(file, made / "scorer")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (made / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "run.toml").write_text(RUN)
    return made


def engine(folder, *arguments, settings=()):
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "engine_core.cli.main", *arguments, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def lines(folder, name):
    text = (folder / "runs" / name / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_roles_on_three_engines_train_and_resume(folder):
    """The actor under ZeRO and the critic under FSDP on two processes, reference and reward model on a third."""
    engine(folder, "train", "run.toml", settings=["run.name=straight", "run.steps=2"])
    engine(folder, "train", "run.toml", settings=["run.name=stopped", "run.steps=1"])
    engine(folder, "resume", "runs/stopped", settings=["run.steps=2"])
    straight, resumed = lines(folder, "straight"), lines(folder, "stopped")
    assert len(straight) == len(resumed) == 2
    for one, two in zip(straight, resumed, strict=True):
        assert one["reward/mean"] == pytest.approx(two["reward/mean"], rel=1e-5)
        for name in ("actor/loss", "actor/grad_norm", "critic/grad_norm", "reward/learned"):
            assert math.isfinite(one[name])
            assert one[name] != 0 or (name, one["step"]) == ("actor/loss", 1)  # of whitened advantages
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_under_another_engine_from_exported_weights(folder):
    """From ZeRO over two processes to one process and out again: the same tensors."""
    two = ["runtime.backend=torchrun", "runtime.torchrun.processes=2"]
    (folder / "sft.toml").write_text(
        '[model]\npath = "model"\n[data]\ntrain = "sft.jsonl"\nprompts_per_step = 4\n'
    )
    rows = [{"prompt": f"{a}+1=", "response": str(a + 1)} for a in range(9)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    zero = [
        *two,
        'trainer="sft"',
        "run.steps=1",
        "actor.backend=deepspeed",
        "actor.optim.lr=1e-2",
        "run.name=zero",
    ]
    engine(folder, "train", "sft.toml", settings=zero)
    engine(folder, "export", "runs/zero", "moved")
    alone = ['trainer="sft"', 'model.path="moved"', "actor.optim.lr=0.0", "run.steps=1", "run.name=alone"]
    engine(folder, "train", "sft.toml", settings=alone)
    engine(folder, "export", "runs/alone", "again")
    began, moved, again = (
        load_file(folder / name / "model.safetensors") for name in ("model", "moved", "again")
    )
    assert moved.keys() == again.keys() == began.keys()
    assert all(torch.equal(moved[name], again[name]) for name in moved)
    assert any(not torch.equal(moved[name], began[name]) for name in moved)
