"""Sampling with top-p and top-k: log-probs over the tokens that were left, on whole runs."""

import dataclasses
import json
import logging

import pytest
import torch

from engine_core import Trainer, load_config
from engine_core.errors import ConfigError
from engine_core.runs.rollout_files import read_rollouts
from engine_core.types import SUPPORT

CUT = {
    "rollout.top_p": 0.9,
    "rollout.top_k": 20,
    "algorithm.mini_batch_prompts": 2,
    "rollout.temperature": 0.8,
}


def digits(completions):
    """Share of characters that are digits."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def trainer(grpo, changes):
    return Trainer(load_config(overrides={**grpo, **CUT, **changes}), rewards=[digits])


def lines_of(run):
    return [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]


def test_an_unchanged_policy_has_the_weight_one_over_what_was_left(grpo):
    run = trainer(grpo, {"algorithm.kl_coef": 0.1})
    run.train()
    for line in lines_of(run):
        assert line["mismatch/max_abs"] < 1e-4
    rollouts = read_rollouts(sorted(run.folder.rollouts_dir.glob("*.parquet"))[-1])
    for rollout in rollouts:
        ids, sampled = rollout.extras[SUPPORT], rollout.loss_mask
        assert ids.shape[1] <= 20
        assert bool((ids[sampled] == rollout.token_ids[sampled][:, None]).any(-1).all())
        assert bool((ids[~sampled] == -1).all())
    # sampled again by the policy as it is now: the same log-probs from both, over the cut distribution
    rollouts = run.sampler.sample(run.sampler.requests(run.source.take(4), step=9))
    run.score(rollouts, 9, training=False)
    batch = run.batch(rollouts)
    mask = batch["loss_mask"]
    over_support = run.groups["actor"].call("infer", batch, outputs=("log_probs",)).result()["log_probs"]
    torch.testing.assert_close(over_support[mask], batch["rollout_log_probs"][mask], atol=1e-4, rtol=0)
    whole = {name: column for name, column in batch.tokens.items() if name != SUPPORT}
    batch.tokens = whole
    over_all = run.groups["actor"].call("infer", batch, outputs=("log_probs",)).result()["log_probs"]
    assert float((over_all - over_support)[mask].mean()) < -0.1  # the mass that was cut away
    run.close()


def test_without_replay_log_probs_are_over_the_whole_vocabulary_and_nothing_is_kept(grpo):
    run = trainer(grpo, {"algorithm.correction.support": "off", "run.steps": 1})
    run.train()
    assert lines_of(run)[0]["mismatch/max_abs"] < 1e-4
    (file,) = run.folder.rollouts_dir.glob("*.parquet")
    assert all(SUPPORT not in rollout.extras for rollout in read_rollouts(file))
    run.close()


def test_a_wider_support_than_may_be_kept_is_the_whole_vocabulary(grpo):
    run = trainer(grpo, {"rollout.max_support": 5, "run.steps": 1})
    run.train()
    assert lines_of(run)[0]["mismatch/max_abs"] < 1e-4
    (file,) = run.folder.rollouts_dir.glob("*.parquet")
    kept = torch.cat([r.extras[SUPPORT][r.loss_mask].ge(0).any(-1) for r in read_rollouts(file)])
    assert not kept.any()  # a random model: top-k 20 leaves more than 5
    run.close()


def without_support(run):
    """The run whose sampler does not tell what was left."""
    for key, (spec, plugin) in run.plugins.chosen.items():
        if spec.kind == "rollout_engines":
            abilities = spec.capabilities - {"support"}
            run.plugins.chosen[key] = (dataclasses.replace(spec, capabilities=abilities), plugin)
    return run


def test_a_sampler_that_cannot_tell_is_said_or_refused(grpo, caplog):
    run = without_support(trainer(grpo, {"run.steps": 1}))
    with caplog.at_level(logging.WARNING, "engine"):
        run.train()
    run.close()
    (said,) = [r.getMessage() for r in caplog.records if "cut the distribution" in r.getMessage()]
    assert said.startswith(
        "rollout.top_p and rollout.top_k cut the distribution, and rollout.backend = 'hf' has no"
    )
    asked = {"algorithm.correction.support": "replay", "run.name": "again"}
    run = without_support(trainer(grpo, asked))
    with pytest.raises(
        ConfigError, match=r"algorithm.correction.support: got 'replay', but rollout.backend = 'hf'"
    ):
        run.train()
