"""A whole run: two processes that share each layer, against one process of the `torch` engine."""

import json
import subprocess
import sys

import pytest

from engine_plugin_testing import reference

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
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
SPLIT = [
    "actor.megatron.cpu_emulation=true",
    "actor.backend=megatron",
    "runtime.backend=torchrun",
    "runtime.torchrun.processes=2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("run")
    reference.write_model(made / "model", {}, 0, True)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (made / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "run.toml").write_text(RUN)
    return made


def engine(folder, *arguments, ends=0):
    command = [sys.executable, "-m", "engine_core.cli.main", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == ends, done.stderr
    return done.stderr


def train(folder, name, *settings):
    told = engine(
        folder, "train", "run.toml", *(w for s in (f"run.name={name}", *settings) for w in ("--set", s))
    )
    return told, metrics(folder, name)


def metrics(folder, name):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_that_share_layers_train_as_one(folder):
    _, alone = train(folder, "alone")
    told, both = train(folder, "both", *SPLIT, "actor.megatron.tp=2")
    assert "actor: tp 2, dp 1." in told
    for number, (one, two) in enumerate(zip(alone, both, strict=True)):
        assert one["reward/mean"] == two["reward/mean"]
        assert two["mismatch/max_abs"] < 1e-4
        for name in ("actor/loss", "actor/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-5 if number == 0 else 1e-3, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_stopped_goes_on_in_the_torch_engine(folder):
    """The stages of a pipeline write one checkpoint, and one process goes on from it."""
    _, straight = train(folder, "straight", "run.steps=4")
    train(folder, "moved", *SPLIT, "actor.megatron.pp=2", "run.steps=2")
    words = ["plugins=[]", "actor.backend=torch", "runtime.backend=local", "run.steps=4"]
    engine(folder, "resume", "runs/moved", *(w for word in words for w in ("--set", word)))
    for one, two in zip(straight, metrics(folder, "moved"), strict=True):
        assert one["reward/mean"] == two["reward/mean"]
        for name in ("actor/loss", "actor/grad_norm", "actor/lr"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_of_experts_of_another_engine_is_refused_before_a_model_is_built(folder):
    """Its weights go on, as an exported folder."""
    reference.write_model(folder / "experts", EXPERTS, 0, True)
    mixture = ("model.path=experts", "run.steps=1", "checkpoint.every_steps=1")
    both = [*SPLIT, "actor.megatron.ep=2"]
    train(folder, "joined", *mixture)
    train(folder, "apart", *mixture, *both)
    there = ["actor.backend=torch", "runtime.backend=local"]
    for name, words, told in (
        ("joined", both, "'megatron' reads each"),
        ("apart", there, "'torch' reads all"),
    ):
        settings = [w for word in (*words, "run.steps=2") for w in ("--set", word)]
        refused = engine(folder, "resume", f"runs/{name}", *settings, ends=2)
        assert "actor.backend: step_00000001 was written with" in refused
        assert told in refused
        assert "engine export RUN OUT" in refused
    engine(folder, "export", "runs/joined", "exported")
    _, found = train(folder, "went_on", "model.path=exported", *mixture[1:], *both)
    assert found[0]["mismatch/max_abs"] < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_actor_of_layers_that_ranks_share_has_a_critic_under_fsdp(folder):
    gae = ("algorithm.advantage=gae", "critic.max_tokens_per_rank=4096", "run.steps=1")
    _, (alone,) = train(folder, "gae_alone", *gae)
    told, (both,) = train(folder, "gae_both", *gae, *SPLIT, "actor.megatron.tp=2", "critic.backend=fsdp")
    assert "critic: sharding 'full' over 2 ranks" in told
    for name in ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm"):
        assert both[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6)
