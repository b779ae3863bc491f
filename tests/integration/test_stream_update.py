"""Runs that learn from complete groups while others are sampled: the same update as after sampling."""

import json
import logging

import pytest
import torch

from engine_core import Trainer, builtin, load_config
from engine_core.errors import ConfigError, TrainingFailed
from engine_core.runs.rollout_files import read_rollouts
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_trainers import stream_update
from engine_plugin_trainers.plugin import engine_advantages

LOSSES = sorted(builtin.engine_losses())
ADVANTAGES = {**builtin.engine_advantages(), **engine_advantages()}
PER_GROUP = sorted(name for name, spec in ADVANTAGES.items() if spec.per_group)
AGGREGATIONS = (
    *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"),
    "seq-mean-token-sum-norm",
)


def digits(completions):
    """Share of characters that are digits: a reward with a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def tails(grpo):
    """Two steps of four groups, whose responses end anywhere between 1 and 40 tokens."""
    return grpo | {
        "data.validation": None,
        "rollout.max_response_tokens": 40,
        "rollout.stop_token_ids": list(range(2, 24)),
        "rollout.hf.tokens_per_step": 3,
        "rollout.weights": "own",
        "actor.optim.lr": 0.02,
        "actor.max_tokens_per_rank": 256,
    }


@pytest.fixture
def together(monkeypatch):
    """Lets the update stream with a sampler in this process, which saves the start of another."""
    monkeypatch.setattr(stream_update, "_placement_problems", lambda trainer: iter(()))


@pytest.fixture
def gradients(monkeypatch):
    """The gradient of each optimizer step, as one vector."""
    found = []
    step = TorchEngine.optimizer_step

    def noted(engine):
        found.append(torch.cat([grad.flatten() for grad in engine._grads()]).clone())
        return step(engine)

    monkeypatch.setattr(TorchEngine, "optimizer_step", noted)
    return found


def trained(settings, name="r", resume=None, watch=None):
    settings = {key: value for key, value in settings.items() if value is not None}
    run = Trainer(load_config(overrides=settings | {"run.name": name}), rewards=[digits])
    if watch is not None:
        watch(run)
    try:
        run.train(resume=resume)
    finally:
        run.close()
    return run.folder.path


def lines_of(folder):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def same_metrics(one, other):
    """Compare the metrics of a step, except those of streaming and of the number of micro-batches."""
    names = {name for line in (one, other) for name in line}
    for name in sorted(n for n in names if not n.startswith("stream/") and n != "actor/micro_batches"):
        assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def case(kind, name):
    """Settings of an algorithm."""
    if kind == "advantage":
        return {"algorithm.advantage": name}
    return {"algorithm.loss": name} if kind == "loss" else {"algorithm.loss_aggregation": name}


OTHERS = {
    "kl in the reward": {"algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward"},
    "kl in the loss, entropy": {"algorithm.kl_coef": 0.1, "algorithm.entropy_coef": 0.01},
    "truncated responses masked": {"algorithm.mask_truncated": True},
    "log-probs of the sampler": {"algorithm.correction.bypass": True},
}


@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(case("advantage", name), id=name) for name in PER_GROUP if name != "distill"),
        *(pytest.param(case("loss", name), id=name) for name in LOSSES),
        *(pytest.param(case("aggregation", name), id=name) for name in AGGREGATIONS),
        *(pytest.param(changes, id=name) for name, changes in OTHERS.items()),
    ],
)
def test_the_gradient_is_that_of_the_update_after_sampling(tails, together, gradients, changes):
    settings = tails | {"run.steps": 1} | changes
    plain = trained(settings, "plain")
    streamed = trained(settings | {"rollout.stream_update": True}, "streamed")
    (line,) = lines_of(streamed)
    assert line["stream/parts"] > 1
    assert line["stream/overlap_share"] > 0
    one, other = gradients
    assert float(one.norm()) > 0
    assert float((one - other).norm()) <= 1e-5 * float(one.norm())
    same_metrics(lines_of(plain)[0], line)
