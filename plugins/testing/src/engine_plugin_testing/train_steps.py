"""Contracts of ``forward_backward`` and ``optimizer_step``: gradients, their norm, steps, schedules."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from engine_core.types import LossCall
from engine_plugin_testing.contracts import REFUSALS, contract, identical, near, refused, same_direction
from engine_plugin_testing.probes import SHORT, SHORTAGES
from engine_plugin_testing.reference import (
    clipped_loss,
    gradient_of,
    nll_loss,
    norm_of,
    outputs_of,
    policy_loss,
)
from engine_plugin_testing.train_bench import NLL, POLICY, TrainBench

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.contracts.engines import TrainEngine
    from engine_core.types import Batch


@contract(catches=("mean over a rank's tokens instead of the global sum", "gradients averaged over ranks"))
def the_gradient_is_that_of_the_global_sum(bench: TrainBench) -> None:
    """The gradient of ``nll`` is the gradient of ``-sum_t w_t log p_t`` over the whole batch.

    The expected gradient comes from an independent autograd.
    """
    batch = bench.batch(temperature=0.8)
    module = bench.reference()
    expected = gradient_of(module, nll_loss(module, batch))
    found, _, _ = bench.measured(batch)
    same_direction(found, expected, bench.gradient_tolerance, "gradient of nll")


OPTIONS: dict[str, Any] = {
    "loss": "ppo_clip",
    "loss_options": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.4, "delta": 1.5},
    "entropy_coef": 0.05,
    "kl_coef": 0.3,
    "kl_estimator": "k2",
    "correction": {"level": "token", "cap": 1.2, "off_policy_threshold": 0.4},
}
"""Parameters of the objective ``policy`` that differ from their defaults."""


@contract(
    catches=(
        "options of the loss ignored",
        "the entropy bonus left out",
        "the KL to the reference left out",
        "the correction of the sampler's gap left out",
    )
)
def the_policy_gradient_equals_the_reference(bench: TrainBench) -> None:
    """The gradient of the clipped policy loss equals the reference's gradient.

    Tokens are on both sides of the clip. The second case has all options of the objective: widths and ``delta`` of the
    loss, the KL, the entropy bonus, importance weights, and ``off_policy_threshold``.
    """
    batch = bench.batch()
    module = bench.reference()
    with torch.no_grad():
        own = outputs_of(module, batch)["log_probs"]
    draws = torch.Generator().manual_seed(3)

    def moved(size: float, *edges: float) -> Tensor:
        """Return the log-probs [T] moved by up to ``size`` nats, and by none near ``edges`` of a ratio."""
        shift = torch.empty(batch.num_tokens).uniform_(-size, size, generator=draws)
        for edge in edges:
            shift[((-shift).exp() - edge).abs() < 0.04] = 0.0
        return (own + shift).float() * batch["loss_mask"]

    batch = batch.with_columns({"old_log_probs": moved(0.4, 0.8, 1.2)})
    expected = gradient_of(module, clipped_loss(module, batch))
    found, _, _ = bench.measured(batch, POLICY)
    same_direction(found, expected, bench.gradient_tolerance, "gradient of the policy loss")
    away = 0.8 * batch.to_tokens(torch.arange(len(batch)) % 3 == 0) * batch["loss_mask"]
    columns = {"old_log_probs": moved(0.6, 0.9, 1.4, 1.5), "ref_log_probs": moved(0.5)}
    batch = batch.with_columns({**columns, "rollout_log_probs": moved(0.3) + away})
    expected = gradient_of(module, policy_loss(module, batch, OPTIONS))
    with torch.no_grad():
        outputs = outputs_of(module, batch)
    far = (outputs["log_probs"] - batch["ref_log_probs"]) ** 2 / 2
    means = {"actor/kl": far, "actor/entropy": outputs["entropy"]}
    for budget in (4096, 24):
        call = LossCall("policy", OPTIONS, outputs=tuple(outputs))
        found, trained, _ = bench.measured(batch, call, budget=budget)
        what = f"of the policy loss with all options and {budget} tokens a micro-batch"
        same_direction(found, expected, bench.gradient_tolerance, f"gradient {what}")
        for name, values in means.items():
            mean = float((batch["token_share"] * values).sum())
            near(trained.metrics[name], mean, 50 * bench.tolerance, f"metric {name} {what}")


@contract(catches=("loss of one rank reported",))
def the_loss_is_that_of_the_whole_batch(bench: TrainBench) -> None:
    """On every rank, ``TrainOutput`` has the loss and metrics of the whole batch."""
    engine, batch = bench.engine(), bench.batch()
    with torch.no_grad():
        module = bench.reference()
        expected = float(nll_loss(module, batch))
        mean = -float((batch["token_share"] * outputs_of(module, batch)["log_probs"]).sum())
    found = bench.forward_backward(engine, batch)
    near(found.loss, expected, 10 * bench.tolerance, "loss")
    near(found.metrics["actor/nll"], mean, 10 * bench.tolerance, "metric actor/nll")


@contract(catches=("no normalisation over micro-batches", "the token budget of the first batch kept"))
def micro_batches_change_neither_loss_nor_gradient(bench: TrainBench) -> None:
    """Loss, gradient and norm do not depend on the number of micro-batches.

    A small token budget gives more micro-batches, also from a later batch on.
    """
    batch = bench.batch((9, 8, 9, 7) * 4)  # several sequences for each of up to 4 ranks
    whole = bench.measured(batch)
    found, trained, step = bench.measured(batch, later_budget=12)
    assert trained.num_micro_batches > whole[1].num_micro_batches, (
        f"A budget of 12 tokens gives {trained.num_micro_batches} micro-batches, one of 4096 "
        f"{whole[1].num_micro_batches}: set_token_budget has no effect."
    )
    near(trained.loss, whole[1].loss, 1e-4, "loss in small micro-batches")
    near(step.grad_norm, whole[2].grad_norm, bench.gradient_tolerance, "gradient norm in small micro-batches")
    same_direction(found, whole[0], bench.gradient_tolerance, "gradient in small micro-batches")
    engine, counts = bench.engine(), []
    for budget in (4096, 12, 4096):
        engine.set_token_budget(budget)
        counts.append(bench.forward_backward(engine, batch).num_micro_batches)
    expected = [n.num_micro_batches for n in (whole[1], trained, whole[1])]
    assert counts == expected, (
        f"Budgets of 4096, 12 and 4096 tokens give {counts} micro-batches of one engine, and {expected} of new ones."
    )


@contract(
    catches=(
        "a call clears the gradients of the one before",
        "gradients of earlier calls lost where a call runs out of memory",
        "the gradient of a try that ran out of memory kept",
        "a late scale that leaves out earlier calls",
        "a late scale that is kept for the next step",
        "weights that change between the calls of a step",
    )
)
def gradients_add_up_over_calls(bench: TrainBench) -> None:
    """Two calls of ``forward_backward`` before one step add up their gradients.

    The step clears them. A call that runs out of memory raises an error, or its gradient is whole and added once. With the
    capability ``late_scale``, the gradients of all calls are scaled before the step, and nothing later.
    """
    batch = bench.batch()
    module = bench.reference()
    expected = norm_of(gradient_of(module, nll_loss(module, batch)))
    engine = bench.engine(optim={"lr": 0.0})
    bench.forward_backward(engine, batch.select(range(4)))
    bench.forward_backward(engine, batch.select(range(4, 8)))
    near(engine.optimizer_step().grad_norm, expected, bench.gradient_tolerance, "norm of two halves")
    near(bench.step(engine, batch).grad_norm, expected, bench.gradient_tolerance, "norm of the step after")
    if "late_scale" in bench.capabilities:
        undivided, before = batch.with_columns({"weights": 64 * batch["weights"]}), bench.weights(engine)
        for part in (range(3), range(3, 4), range(4, 8)):
            bench.forward_backward(engine, undivided.select(part))
            identical(bench.weights(engine), before, "weights between the calls of a step")
        engine.scale_gradients(1 / 64)
        near(engine.optimizer_step().grad_norm, expected, bench.gradient_tolerance, "norm of calls, scaled")
        near(
            bench.step(engine, batch).grad_norm,
            expected,
            bench.gradient_tolerance,
            "norm after a scaled step",
        )
    # on several ranks, the others would wait for the one that fails
    for earlier in (False, True) if bench.place.world_size == 1 else ():
        engine, rest = bench.engine(optim={"lr": 0.0}, budget=24), batch
        if earlier:
            bench.forward_backward(engine, batch.select(range(4)))
            rest = batch.select(range(4, 8))
            engine.set_token_budget(16)
        SHORTAGES[:] = [None, torch.OutOfMemoryError]  # the second micro-batch, once
        try:
            bench.forward_backward(engine, rest, LossCall(SHORT))
        except REFUSALS:
            continue
        finally:
            SHORTAGES.clear()
        what = f"norm after a{' second' if earlier else ''} call that ran out of memory and raised no error"
        near(engine.optimizer_step().grad_norm, expected, bench.gradient_tolerance, what)


@contract(catches=("the norm after clipping reported",))
def grad_norm_is_the_global_norm_before_clipping(bench: TrainBench) -> None:
    """``StepOutput.grad_norm`` is the L2 norm of the whole gradient before clipping, and the same on every rank."""
    batch = bench.batch()
    module = bench.reference()
    expected = norm_of(gradient_of(module, nll_loss(module, batch)))
    _, _, step = bench.measured(batch, optim={"max_grad_norm": expected / 4})
    near(step.grad_norm, expected, bench.gradient_tolerance, "grad_norm")


@contract(catches=("gradients summed over ranks in half precision",))
def the_norm_is_the_same_on_any_number_of_ranks(bench: TrainBench) -> None:
    """On any number of ranks, the gradient's norm equals that of a float64 autograd to six digits.

    Sequences are packed or one at a time.
    """
    batch = bench.batch((9, 31, 9, 7) * 2, seed=4)
    module = bench.reference()
    expected = norm_of(gradient_of(module, nll_loss(module, batch)))
    for budget in (4096, 1):
        engine = bench.engine(optim={"lr": 0.0}, budget=budget)
        found = bench.step(engine, batch).grad_norm
        near(found, expected, bench.norm_tolerance, f"grad_norm with {budget} tokens a micro-batch")


@contract(catches=("gradients not clipped",))
def gradients_are_clipped_to_max_grad_norm(bench: TrainBench) -> None:
    """Before the step, a gradient with a norm above ``max_grad_norm`` is scaled down to it.

    A smaller gradient is unchanged.
    """
    batch = bench.batch()
    module = bench.reference()
    expected = gradient_of(module, nll_loss(module, batch))
    norm = norm_of(expected)
    found, _, _ = bench.measured(batch, optim={"max_grad_norm": norm / 4})
    scaled = {name: value / 4 for name, value in expected.items()}
    same_direction(found, scaled, bench.gradient_tolerance, "gradient clipped to a quarter")
    found, _, _ = bench.measured(batch, optim={"max_grad_norm": norm * 4})
    same_direction(found, expected, bench.gradient_tolerance, "gradient under the limit")


@contract(catches=("advantages with the wrong sign",))
def a_step_follows_the_sign_of_the_advantages(bench: TrainBench) -> None:
    """A policy step makes sequences with positive advantages more likely, and those with negative advantages less likely."""
    engine, batch = bench.engine(optim={"lr": 1e-3}), bench.batch((9, 12, 11, 8), seed=5)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0])
    batch = batch.with_columns({"advantages": batch.to_tokens(signs)})
    before = batch.sum_by_sequence(bench.infer(engine, batch)["log_probs"])
    bench.step(engine, batch, POLICY)
    change = batch.sum_by_sequence(bench.infer(engine, batch)["log_probs"]) - before
    assert bool((change * signs > 0).all()), (
        f"Log-probs changed by {[round(value, 4) for value in change.tolist()]}; expected the signs {signs.tolist()}."
    )


@contract(catches=("weights that shrink in every step",))
def nothing_to_learn_leaves_the_weights_alone(bench: TrainBench) -> None:
    """If a batch has nothing to learn, the gradient is 0 and the weights stay the same.

    Cases: advantages of 0, and no loss token at all. The step is finite and not skipped.
    """
    batch = bench.batch()
    still = batch.with_columns({"advantages": torch.zeros(batch.num_tokens)})
    masked = batch.with_columns(
        {name: torch.zeros_like(batch[name]) for name in ("loss_mask", "weights", "token_share")}
    )
    for what, case, loss in (("advantages of 0", still, POLICY), ("no loss token", masked, NLL)):
        engine = bench.engine(optim={"lr": 1.0, "weight_decay": 0.0})
        before = bench.weights(engine)
        step = bench.step(engine, case, loss)
        assert (step.grad_norm, step.skipped) == (0.0, False), (
            f"{what}: {step}; expected grad_norm 0, not skipped."
        )
        identical(bench.weights(engine), before, f"weights after a step with {what}")


def _poisoned(batch: Batch) -> Batch:
    """Return the batch with an infinite weight in its last sequence: one rank has a non-finite gradient."""
    weights = batch["weights"].clone()
    weights[-1] = math.inf
    return batch.with_columns({"weights": weights})


@contract(
    catches=(
        "a step with a NaN gradient is applied",
        "a schedule that moves with a skipped step",
        "finite gradients left by a skipped step",
        "a loss that is not finite taken for an overflow in fp16",
        "overflows in fp16 not reported after a loss that is not finite",
    )
)
def a_gradient_that_is_not_finite_skips_the_step(bench: TrainBench) -> None:
    """If the gradient is not finite on one rank, all ranks skip the step.

    The skip is reported, and the weights stay. The next good step is the same as without the skipped one, but for
    rounding if the skip has changed a loss scale. Finite gradients of a norm of 1e30, which an engine may skip, end as without the skip before.
    """
    optim = {"schedule": "linear", "warmup_steps": 5}
    batch = bench.batch()
    spared, hit = bench.engine(optim=optim), bench.engine(optim=optim)
    for engine in (spared, hit):
        bench.step(engine, batch)
    before = bench.weights(hit)
    step = bench.step(hit, _poisoned(batch))
    assert step.skipped, f"The step is not reported as skipped: {step}."
    assert not math.isfinite(step.grad_norm), f"grad_norm is {step.grad_norm}; expected inf or nan."
    assert not step.rescaled, "A loss that is not finite is reported as an overflow in fp16."
    identical(bench.weights(hit), before, "weights after a skipped step")
    exact = bench.exact and not step.rescaled
    norm = _same_step(bench, spared, hit, batch, exact)
    huge = batch.with_columns({"weights": batch["weights"] * (1e30 / norm)})
    steps = [bench.step(engine, huge) for engine in (spared, hit)]
    found = [(step.skipped, step.rescaled) for step in steps]
    assert found[0] == found[1], (
        f"Gradients of a norm of 1e30 gave (skipped, rescaled) = {found[0]}, and {found[1]} after a loss that is not finite."
    )
    _same_step(bench, spared, hit, batch, exact)


def _same_step(bench: TrainBench, spared: TrainEngine, hit: TrainEngine, batch: Batch, exact: bool) -> float:
    """Take a good step with both engines, compare them, and return the norm."""
    steps = [bench.step(engine, batch) for engine in (spared, hit)]
    assert not steps[1].skipped, "The good step after a skipped one is skipped too."
    assert steps[0].lr == steps[1].lr, (
        f"The skipped step moved the schedule: lr {steps[1].lr}, expected {steps[0].lr}."
    )
    identical(bench.weights(hit), bench.weights(spared), "weights one step after a skipped one", exact)
    return steps[0].grad_norm


SCHEDULES: tuple[tuple[dict[str, Any], tuple[float, ...]], ...] = (
    (
        {"schedule": "linear", "warmup_steps": 2, "decay_steps": 6, "min_lr_ratio": 0.1},
        (0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1),
    ),
    (
        {"schedule": "cosine", "warmup_steps": 1, "min_lr_ratio": 0.2},  # over a run of 5 steps
        (1.0, 1.0, 0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.6 - 0.4 * math.sqrt(0.5), 0.2, 0.2),
    ),
    ({"warmup_steps": 2, "min_lr_ratio": 0.5}, (0.5, 1.0, 1.0, 1.0)),  # constant
    ({"schedule": "linear", "warmup_steps": 1, "decay_steps": 2, "min_lr_ratio": 0.5}, (1.0, 1.0, 0.5, 0.5)),
)
"""Keys of ``[actor.optim]``, and the rate of each step as a share of the peak, also past the end."""


@contract(
    catches=(
        "the learning rate of the next step reported",
        "no warm-up before a constant rate",
        "a learning rate that decays past its floor",
        "a decay counted from the start of the warm-up",
        "a cosine that rises past its end",
        "a schedule that moves with each micro-batch",
        "a decay of one step that takes two",
    )
)
def the_learning_rate_follows_its_schedule(bench: TrainBench) -> None:
    """``StepOutput.lr`` is the rate that the step used, and follows the schedule of ``[actor.optim]``.

    Schedules are constant, linear and cosine, with a warm-up and a floor, also past their ends. Steps have several
    micro-batches, in one call or in two.
    """
    batch = bench.batch((5, 6, 7, 8))
    for optim, shares in SCHEDULES:
        engine = bench.engine(optim={"lr": 0.1, **optim}, budget=16, total_steps=5)
        calls = (range(2), range(2, 4)) if optim.get("schedule") == "linear" else (range(4),)
        for number, share in enumerate(shares):
            for part in calls:
                bench.forward_backward(engine, batch.select(part))
            near(engine.optimizer_step().lr, 0.1 * share, 1e-5, f"lr of step {number} with {optim}")


@contract(catches=("weight decay on vectors",))
def weight_decay_is_on_matrices_only(bench: TrainBench) -> None:
    """Without a gradient, weight decay shrinks matrices by ``lr * weight_decay`` and leaves vectors unchanged."""
    engine, batch = bench.engine(optim={"lr": 0.1, "weight_decay": 0.5}), bench.batch()
    before = bench.weights(engine)
    bench.step(engine, batch.with_columns({"advantages": torch.zeros(batch.num_tokens)}), POLICY)
    for name, after in bench.weights(engine).items():
        share = 0.95 if after.ndim >= 2 else 1.0
        gap = float((after - share * before[name]).abs().max())
        assert gap <= 1e-5, f"'{name}' is off by {gap:.3g} from {share} of what it was."


@contract()
def a_role_that_is_not_trained_has_no_optimizer(bench: TrainBench) -> None:
    """With ``trainable=False``, the engine has no optimizer and refuses to step.

    It can still run ``infer``.
    """
    engine, batch = bench.engine(trainable=False, role="ref"), bench.batch()
    bench.infer(engine, batch)
    assert engine.optimizer is None, "An engine that is not trained has an optimizer."
    with refused("optimizer_step of a role that is not trained"):
        engine.optimizer_step()


@contract(
    capability="set_lr",
    catches=("set_lr sets the rate, not the peak", "set_lr ends the warm-up", "a peak of 0 that stays"),
)
def set_lr_replaces_the_peak(bench: TrainBench) -> None:
    """``set_lr`` changes the peak learning rate, starting with the next step.

    The factor of the schedule stays.
    """
    engine = bench.engine(optim={"lr": 0.1, "schedule": "linear", "decay_steps": 4})
    batch = bench.batch()
    near(bench.step(engine, batch).lr, 0.1, 1e-5, "lr of the first step")
    engine.set_lr(0.2)
    near(bench.step(engine, batch).lr, 0.2 * 0.75, 1e-5, "lr of the second step, after set_lr(0.2)")
    rising = bench.engine(optim={"lr": 0.1, "warmup_steps": 4})
    bench.step(rising, batch)
    rising.set_lr(0.2)
    for number, share in enumerate((0.5, 0.75, 1.0, 1.0), 2):
        near(
            bench.step(rising, batch).lr,
            0.2 * share,
            1e-5,
            f"lr of step {number}, after set_lr(0.2) in the warm-up",
        )
    still = bench.engine(optim={"lr": 0.0, "schedule": "linear", "decay_steps": 4})
    near(bench.step(still, batch).lr, 0.0, 1e-5, "lr of a step with a peak of 0")
    still.set_lr(0.2)
    near(bench.step(still, batch).lr, 0.2 * 0.75, 1e-5, "lr of the second step, after set_lr(0.2) from 0")
