"""The reference engine against a slow one: a sequence at a time, whole logits, float64."""

from __future__ import annotations

import pytest
import torch
from engine_core.types import LossCall
from transformers import AutoModelForCausalLM

NLL = LossCall("nll")
FAMILIES = ["qwen3", "llama", "gemma2", "mistral", "granite"]


def slow_reference(engine, batch):
    """Log-probs, entropies [T] and gradients of sum(-weights * log_probs), in float64, unpacked, eager."""
    model = AutoModelForCausalLM.from_config(
        engine.module.config, attn_implementation="eager", dtype=torch.float64
    )
    model.load_state_dict({name: value.double() for name, value in engine.module.state_dict().items()})
    model.eval()
    log_probs, entropies = [], []
    for ids, mask in zip(
        batch.token_ids.split(batch.lengths.tolist()),
        batch["loss_mask"].split(batch.lengths.tolist()),
        strict=True,
    ):
        logits = model(input_ids=ids[None], use_cache=False).logits[0].double() / batch.temperature
        spread = torch.log_softmax(logits, -1)
        here = spread[:-1].gather(1, ids[1:, None])[:, 0] * mask[1:]
        log_probs.append(torch.cat([here.new_zeros(1), here]))
        entropy = -(spread.exp() * spread).sum(-1)[:-1] * mask[1:]
        entropies.append(torch.cat([entropy.new_zeros(1), entropy]))
    log_probs, entropies = torch.cat(log_probs), torch.cat(entropies)
    (-batch["weights"].double() * log_probs).sum().backward()
    return log_probs.detach(), entropies.detach(), {n: p.grad for n, p in model.named_parameters()}


def gradients(engine):
    return {name: p.grad.clone() for name, p in engine.module.named_parameters()}


def largest_relative_difference(found, expected):
    """Per parameter: norm of the difference over norm."""
    assert found.keys() == expected.keys()
    return max(float((found[n].double() - expected[n]).norm() / expected[n].norm()) for n in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_entropies_and_gradients_are_those_of_the_slow_reference(make_engine, batch_of, family):
    engine = make_engine(family, budget=40, log_prob_chunk_tokens=8)
    batch = batch_of([7, 23, 1, 12, 5, 12, 2, 9], temperature=0.7)
    log_probs, entropies, expected = slow_reference(engine, batch)
    found = engine.infer(batch, ["log_probs", "entropy"])
    torch.testing.assert_close(found["log_probs"].double(), log_probs, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(found["entropy"].double(), entropies, rtol=1e-5, atol=2e-5)
    output = engine.forward_backward(batch, NLL)
    assert output.loss == pytest.approx(float(-(batch["weights"] * log_probs).sum()), rel=1e-5)
    assert largest_relative_difference(gradients(engine), expected) < 1e-5
