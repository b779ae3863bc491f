"""Out of memory in a micro-batch: half the budget, and the mini-batch again."""

from __future__ import annotations

import logging

import pytest
import torch

from engine_core.types import LossCall

NLL = LossCall("nll")


def gradients(engine):
    return {name: p.grad.cpu().clone() for name, p in engine.module.named_parameters()}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).norm() / value.norm()) < 1e-5, name


def fails_over(engine, most):
    """The engine's forward pass has memory for micro-batches of ``most`` tokens; returns the sizes it saw."""
    forward, sizes = engine.forward, []

    def with_little_memory(micro, *args, **kwargs):
        sizes.append(micro.num_tokens)
        if len(sizes) > 1 and micro.num_tokens > most:  # the first has left a gradient by then
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return forward(micro, *args, **kwargs)

    with_little_memory.outputs = forward.outputs
    engine.forward = with_little_memory
    return sizes


def test_the_mini_batch_is_done_again_in_smaller_parts_and_its_gradient_is_right(
    make_engine, batch_of, caplog
):
    batch = batch_of([10] * 8)
    expected = make_engine("qwen3", budget=20)
    expected.forward_backward(batch, NLL)
    engine = make_engine("qwen3", budget=40)
    sizes = fails_over(engine, most=20)
    with caplog.at_level(logging.WARNING, logger="engine"):
        output = engine.forward_backward(batch, NLL)
    assert sizes == [40, 40, 20, 20, 20, 20]
    assert output.num_micro_batches == 4
    assert_close(gradients(engine), gradients(expected))
    assert "actor.max_tokens_per_rank = 20" in caplog.text
    engine.optimizer_step()
    assert engine.forward_backward(batch, NLL).num_micro_batches == 4  # and so it stays


def test_a_sequence_too_long_for_the_device_is_an_error(make_engine, batch_of):
    engine = make_engine("qwen3", budget=40)
    fails_over(engine, most=5)
    with pytest.raises(torch.OutOfMemoryError):
        engine.forward_backward(batch_of([10] * 8), NLL)


def test_gradients_of_an_earlier_call_are_not_lost_without_a_word(make_engine, batch_of):
    engine = make_engine("qwen3", budget=40)
    engine.forward_backward(batch_of([10] * 8), NLL)
    before = gradients(engine)
    fails_over(engine, most=20)
    with pytest.raises(torch.OutOfMemoryError):
        engine.forward_backward(batch_of([10] * 8), NLL)
    assert before.keys() == gradients(engine).keys()


def test_inference_is_done_again_in_smaller_parts_and_gradients_stay(make_engine, batch_of):
    batch = batch_of([10] * 8)
    expected = make_engine("qwen3", budget=20).infer(batch, ["log_probs"])["log_probs"]
    engine = make_engine("qwen3", budget=40)
    engine.forward_backward(batch, NLL)
    before = gradients(engine)
    sizes = fails_over(engine, most=20)
    found = engine.infer(batch, ["log_probs"])["log_probs"]
    assert sizes == [40, 40, 20, 20, 20, 20]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert_close(gradients(engine), before)
    assert engine.config.max_tokens_per_rank == 20  # the plan of the update to come is that of its log-probs


def test_a_model_that_is_not_trained_tries_again_too(make_engine, batch_of):
    engine = make_engine("qwen3", budget=40, role="ref", trainable=False)
    sizes = fails_over(engine, most=20)
    engine.infer(batch_of([10] * 8), ["log_probs"])
    assert sizes[-4:] == [20] * 4
