"""Supervised fine-tuning as whole runs."""

from __future__ import annotations

import pytest
import torch

from engine_core import load_config
from engine_core.config.assemble import plugins_for


@pytest.fixture
def trainer(sft_run, monkeypatch):
    """A trainer that also learns the prompts, and evaluates at the end."""
    monkeypatch.chdir(sft_run.parent)
    changes = {"sft.train_on_prompt": True, "run.steps": 1, "eval.at_end": True, "actor.optim.lr": 0.0}
    config = load_config(sft_run, overrides=changes)
    made = plugins_for(config).resolve("trainers", "sft")(config)
    yield made
    made.close()


def test_the_loss_is_a_mean_over_the_tokens_that_have_one_before_them(trainer):
    metrics = trainer.train()
    assert metrics["tokens/learned"] == metrics["tokens/total"] - 4  # rows of a step
    module, total, count = trainer.runtime.engines["actor"].module, 0.0, 0
    for item in trainer.source_of("train", trainer.config.data, None).all():
        ids = torch.tensor([item.token_ids])
        with torch.no_grad():
            mean = module(ids, labels=ids).loss  # of all tokens but the first
        total, count = total + float(mean) * (ids.numel() - 1), count + ids.numel() - 1
    assert metrics["eval/nll"] == pytest.approx(total / count, rel=1e-5)
