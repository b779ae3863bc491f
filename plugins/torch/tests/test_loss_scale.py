"""The loss scale alone, and steps of the reference engine in fp16."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch

from engine_core.types import LossCall
from engine_plugin_torch.loss_scale import GROWTH_STEPS, LossScale
from engine_plugin_torch.options import TorchOptions

NLL = LossCall("nll")


def step(engine, batch):
    loss = engine.forward_backward(batch, NLL).loss
    return loss, engine.optimizer_step()


def grown(scale, steps):
    for _ in range(steps):
        assert not scale.stepped(skipped=False)
    return scale.factor


# -- the factor ---------------------------------------------------------------


def test_a_factor_doubles_after_many_good_steps_in_a_row():
    scale = LossScale(8.0)
    assert grown(scale, GROWTH_STEPS - 1) == 8.0
    assert grown(scale, 1) == 16.0
    assert grown(scale, GROWTH_STEPS - 1) == 16.0


def test_an_overflow_halves_the_factor_and_counts_good_steps_from_0():
    scale = LossScale(8.0)
    grown(scale, GROWTH_STEPS - 1)
    assert scale.stepped(skipped=True)
    assert (scale.factor, scale.good_steps) == (4.0, 0)
    assert grown(scale, 1) == 4.0


def test_at_a_factor_of_1_an_overflow_is_not_that_of_the_scale():
    scale = LossScale(2.0)
    assert [scale.stepped(skipped=True) for _ in range(3)] == [True, False, False]
    assert scale.factor == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_leaves_the_factor_and_counts_for_one_step(bad):
    scale = LossScale(8.0)
    scale.see(bad)
    scale.see(1.0)
    assert not scale.stepped(skipped=True)
    assert scale.factor == 8.0
    scale.see(1.0)
    assert scale.stepped(skipped=True)


def test_without_fp16_nothing_is_scaled_or_saved():
    scale, loss, gradient = LossScale(), torch.tensor(3.0), torch.ones(2)
    assert scale.scaled(loss) is loss
    scale.unscale([gradient])
    assert gradient.tolist() == [1.0, 1.0]
    assert not scale.stepped(skipped=True)
    assert (scale.factor, scale.state()) == (1.0, {})


def test_a_state_continues_where_it_was_and_a_checkpoint_without_one_changes_nothing():
    scale, other = LossScale(8.0), LossScale(64.0)
    grown(scale, 7)
    other.load({"num_skipped_steps": 0})
    assert other.factor == 64.0
    other.load(scale.state())
    assert other.state() == scale.state() == {"loss_scale": {"factor": 8.0, "good_steps": 7}}


# -- an engine -----------------------------------------------------------------


def test_the_gradient_and_its_norm_are_those_of_float64_within_the_rounding_of_fp16(make_engine, batch):
    engine = make_engine(compute_dtype="fp16", optim={"max_grad_norm": 0})
    module = copy.deepcopy(engine.module).double()
    mask, offsets = batch["loss_mask"], batch.offsets.tolist()
    total = torch.zeros((), dtype=torch.float64)
    for first, end in itertools.pairwise(offsets):  # each sequence alone
        ids, learned = batch.token_ids[first:end], mask[first:end]
        if learned.any():
            log_probs = module(ids[None].to(engine.device)).logits[0].log_softmax(-1)
            picked = log_probs[:-1].gather(1, ids[1:, None].to(engine.device))[:, 0].cpu()
            total = total - (picked * batch["weights"][first + 1 : end] * learned[1:]).sum()
    total.backward()
    exact = {name: p.grad for name, p in module.named_parameters()}
    norm = float(torch.stack([g.norm() for g in exact.values()]).norm())
    found, seen = engine.forward_backward(batch, NLL), {}
    engine.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in engine.module.named_parameters()})
    )
    assert found.loss == pytest.approx(total.item(), rel=2e-3)
    assert engine.optimizer_step().grad_norm == pytest.approx(norm, rel=5e-3)
    gap = float(torch.stack([(seen[n].double() - exact[n]).norm() for n in exact]).norm())
    assert 0 < gap < 0.01 * norm


def test_small_gradients_are_0_without_a_scale_and_right_with_it(make_engine, batch):
    small = batch.with_columns({"weights": batch["weights"] * 2.0**-22})
    norms = {}
    for scale in (1.0, 2.0**20):
        engine = make_engine(compute_dtype="fp16", loss_scale=scale)
        norms[scale] = step(engine, small)[1].grad_norm
    exact = step(make_engine(), small)[1].grad_norm
    assert norms[2.0**20] == pytest.approx(exact, rel=5e-3)
    assert norms[1.0] < 0.9 * exact


def test_the_norm_does_not_depend_on_the_scale(make_engine, batch):
    engines = [make_engine(compute_dtype="fp16", loss_scale=scale) for scale in (2.0**10, 2.0**12)]
    results = [step(engine, batch) for engine in engines]
    assert results[0][1].grad_norm == pytest.approx(results[1][1].grad_norm, rel=1e-4)


def test_an_overflow_leaves_everything_alone_and_steps_follow_at_a_lower_scale(make_engine, batch):
    engine = make_engine(compute_dtype="fp16", loss_scale=2.0**30)
    before = {name: value.clone() for name, value in engine.named_weights()}
    steps = []
    while not steps or steps[-1].skipped:
        assert all(torch.equal(value, before[name]) for name, value in engine.named_weights())
        steps.append(step(engine, batch)[1])
    assert len(steps) > 2
    assert all(done.rescaled and not math.isfinite(done.grad_norm) for done in steps[:-1])
    assert not steps[-1].rescaled
    assert engine.loss_scale.factor == 2.0 ** (30 - len(steps[:-1]))
    assert engine.num_skipped_steps == len(steps) - 1
    assert any(not torch.equal(value, before[name]) for name, value in engine.named_weights())


def test_a_loss_that_is_not_finite_is_no_overflow(make_engine, batch):
    engine = make_engine(compute_dtype="fp16")
    weights = batch["weights"].clone()
    weights[-1] = math.inf
    done = step(engine, batch.with_columns({"weights": weights}))[1]
    assert (done.skipped, done.rescaled) == (True, False)
    assert engine.loss_scale.factor == 65536.0


def test_a_resumed_run_has_the_scale_of_the_uninterrupted_one(make_engine, batch, tmp_path):
    engine = make_engine(compute_dtype="fp16", loss_scale=2.0**30)
    while step(engine, batch)[1].skipped:
        pass
    engine.save(tmp_path).result()
    again = make_engine(compute_dtype="fp16", loss_scale=2.0**30)
    again.load(tmp_path)
    assert again.loss_scale.state() == engine.loss_scale.state()
    assert again.loss_scale.good_steps == 1
    assert step(again, batch) == step(engine, batch)
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(again.named_weights(), engine.named_weights(), strict=True)
    )


def test_a_role_that_is_not_trained_has_no_scale(make_engine):
    assert not make_engine(compute_dtype="fp16", role="ref", trainable=False).loss_scale.active
    assert not make_engine(compute_dtype="bf16").loss_scale.active


def test_a_scale_without_fp16_is_refused_and_so_is_fp16_over_bf16():
    with pytest.raises(ValueError, match="loss_scale has no effect without compute_dtype = 'fp16'"):
        TorchOptions(loss_scale=2.0)
    with pytest.raises(ValueError, match="compute_dtype 'fp16' over param_dtype 'bf16' has no effect"):
        TorchOptions(param_dtype="bf16", compute_dtype="fp16")
