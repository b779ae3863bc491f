"""Contracts of whole runs and of what one batch does not show: several steps, every output's gradient, other models."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from engine_core.types import LossCall
from engine_plugin_testing.contracts import close, contract, identical, near, same_direction
from engine_plugin_testing.probes import PROBE, probed
from engine_plugin_testing.reference import (
    ReferenceSteps,
    fill,
    gradient_of,
    nll_loss,
    norm_of,
    outputs_of,
    probe_outputs,
    published,
)
from engine_plugin_testing.train_bench import NLL, ODD, TrainBench, rounding

if TYPE_CHECKING:
    from torch import Tensor

RUNS: tuple[tuple[dict[str, Any], int], ...] = (
    (
        {"lr": 2e-2, "betas": (0.8, 0.95), "weight_decay": 0.5, "schedule": "cosine", "warmup_steps": 2,
         "decay_steps": 5, "min_lr_ratio": 0.2, "clips": 0.9}, 7,
    ),
    (
        {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-2, "schedule": "linear", "warmup_steps": 1, "clips": 0.0}, 4,
    ),
)  # fmt: skip
"""Values of ``[actor.optim]`` and steps; ``clips`` is ``max_grad_norm`` as a share of the first gradient's norm."""
SIZES = (1.0, 0.3, 2.0, 0.5, 1.0, 3.0, 0.2)  # of each step's loss: some are clipped


@contract(
    catches=(
        "the entropy without its gradient",
        "the gradient of the entropy without the temperature",
        "the sum of squares without its gradient",
        "a gradient through an output that is only watched",
    )
)
def gradients_of_other_outputs_equal_the_reference(bench: TrainBench) -> None:
    """The gradients of ``entropy`` and ``sum_pi_squared`` equal those from a float64 autograd.

    An output in ``watched`` has no gradient.
    """
    _compare_gradients(bench, ("entropy", "sum_pi_squared"))
    _compare_gradients(bench, ("log_probs",), watched=("entropy",))
    _compare_gradients(bench, ("entropy", "sum_pi_squared"), watched=("log_probs",))


@contract(
    catches=(
        "the gradient of the rest without the temperature",
        "candidates without a gradient",
        "the gradient of the first candidate only",
    )
)
def gradients_of_candidates_equal_the_reference(bench: TrainBench) -> None:
    """The gradients of ``log_probs_at`` and ``log_rest`` equal those from a float64 autograd.

    They are compared together and alone. The K candidates of a token have different coefficients.
    """
    _compare_gradients(bench, ("log_probs_at", "log_rest"))
    _compare_gradients(bench, ("log_probs_at",))


@contract(
    capability="support",
    catches=(
        "the gradient over the whole vocabulary with a support",
        "a support whose sum has no gradient",
        "no gradient where the support is the whole vocabulary",
    ),
)
def the_gradient_over_a_support_equals_the_reference(bench: TrainBench) -> None:
    """With ``support_ids``, the gradient of ``log_probs`` is the gradient of ``log (p[token] / sum of p over them)``.

    Some rows are -1, which means the whole vocabulary.
    """
    _compare_gradients(bench, ("log_probs",), support=True)


def _compare_gradients(
    bench: TrainBench, outputs: tuple[str, ...], watched: tuple[str, ...] = (), support: bool = False
) -> None:
    names = (*outputs, *watched)
    batch = probed(bench.batch(temperature=0.7), *names)
    if not support:
        batch.tokens.pop("support_ids")
    module = bench.reference()
    expected = probe_outputs(module, batch, names)
    expected |= {name: expected[name].detach() for name in watched}
    loss = torch.stack([(batch[f"probe/{name}"] * expected[name]).sum() for name in names]).sum()
    gradient = gradient_of(module, loss)
    size = 1 / norm_of(gradient)  # near 1, so that AdamW's first step shows it
    batch = batch.with_columns({f"probe/{name}": size * batch[f"probe/{name}"] for name in names})
    found, trained, _ = bench.measured(batch, LossCall(PROBE, outputs=outputs, watched=watched), budget=24)
    what = " and ".join(names)
    same_direction(
        found, {n: size * g for n, g in gradient.items()}, bench.gradient_tolerance, f"gradient of {what}"
    )
    bound = bench.tolerance * float(sum(batch[f"probe/{name}"].abs().sum() for name in names))
    close(torch.tensor(trained.loss), size * loss.detach(), 5 * bound, f"loss of {what}")


@contract(
    catches=(
        "the two betas of AdamW swapped",
        "moments without bias correction",
        "weight decay added to the gradient",
        "weight decay at the peak rate",
        "a schedule that rises again",
        "a schedule that moves with each call",
        "each tensor clipped by itself",
        "clipped values in place of a clipped norm",
    )
)
def several_steps_equal_an_independent_optimizer(bench: TrainBench) -> None:
    """Over several steps, each step moves the weights as an independent float64 AdamW does.

    Moments, decay, clipping and rates are written from their formulas.
    """
    for optim, steps in RUNS:
        _compare_steps(bench, dict(optim), steps)


def _compare_steps(bench: TrainBench, optim: dict[str, Any], steps: int) -> None:
    adam = bench.settings["optimizer"] == "adamw"
    kept = optim if adam else {"lr": optim["lr"], "clips": optim["clips"]}
    module = bench.reference()
    first = norm_of(gradient_of(module, nll_loss(module, bench.batch(seed=0))))
    kept["max_grad_norm"] = kept.pop("clips") * first
    engine = bench.engine(optim=kept, budget=40, total_steps=3)
    reference = ReferenceSteps(kept, 3, adam)
    weights = bench.weights(engine)
    for number in range(steps):
        batch = bench.batch(seed=number)
        batch = batch.with_columns({"weights": SIZES[number] * batch["weights"]})
        fill(module, weights)
        gradient = gradient_of(module, nll_loss(module, batch))
        for part in (range(3), range(3, len(batch))):
            bench.forward_backward(engine, batch.select(part))
        step = engine.optimizer_step()
        expected, slopes, rate, norm = reference.step(weights, gradient)
        near(step.grad_norm, norm, bench.gradient_tolerance, f"grad_norm of step {number + 1}")
        near(step.lr, rate, 1e-5, f"lr of step {number + 1}")
        before, weights = weights, bench.weights(engine)
        moved = before, weights, expected
        compare_moves(bench, moved, gradient, slopes, rate, f"step {number + 1}")


def compare_moves(
    bench: TrainBench,
    moved: tuple[Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Tensor]],
    gradient: Mapping[str, Tensor],
    slopes: Mapping[str, Tensor],
    rate: float,
    what: str,
) -> None:
    """Assert that weights moved as expected, within what the rounding of a gradient moves them.

    Args:
        bench: the bench.
        moved: weights [D_1, D_2, ...] by name: before the step, after it, and as expected after it.
        gradient: the gradient [D_1, D_2, ...] by name.
        slopes: how much each weight moves per unit of its gradient, by name.
        rate: the learning rate.
        what: context for the failure's message.
    """
    before, found, expected = moved
    adam = bench.settings["optimizer"] == "adamw"
    whole = sum(float(g.pow(2).sum()) for g in gradient.values()) / sum(g.numel() for g in gradient.values())
    for name, after in found.items():
        past = (
            float(slopes[name].pow(-2).mean()) if adam else 0.0
        )  # moments keep the rounding of larger gradients
        # rounding is relative to what is summed: in an embedding, the row of a frequent token has more than the others
        rows = gradient[name].pow(2).mean(-1, keepdim=True) if gradient[name].ndim > 1 else torch.zeros(())
        size = rows.clamp(min=max(float(gradient[name].pow(2).mean()), past, 1e-6 * whole)).sqrt()
        noise = rate * (5 * bench.precision * size * slopes[name]).clamp(max=2.0)
        noise += 4 * torch.finfo(after.dtype).eps * before[name].double().abs() + 1e-7
        gap = (after.double() - expected[name]).abs() / noise
        at = int(gap.argmax())
        assert bool((gap <= 1).all()), (
            f"{what}: {int((gap > 1).sum())} of {gap.numel()} values of '{name}' moved otherwise. The worst, at {at}, by "
            f"{float((after.double() - before[name].double()).flatten()[at]):.6g}, expected "
            f"{float((expected[name] - before[name].double()).flatten()[at]):.6g}."
        )


@contract(
    catches=(
        "clipping that starts slightly above the limit",
        "clipping that starts below the limit",
        "a norm in half precision",
        "a constant added under the square root of the norm",
        "large gradients cut before the norm",
        "the clipping factor in half precision",
    )
)
def clipping_begins_at_the_limit_and_survives_any_norm(bench: TrainBench) -> None:
    """Clipping starts exactly at ``max_grad_norm``. Very small and very large norms are exact too.

    A norm of 1.001 times the limit is scaled to it, and one of 0.999 times the limit is unchanged. Norms from 1e-9 to
    1e8 are as exact as others, a large gradient is scaled to the limit, and nothing is skipped.
    """
    batch = bench.batch()
    module = bench.reference()
    expected = gradient_of(module, nll_loss(module, batch))
    norm = norm_of(expected)
    for share, what in ((1.001, "clipped by a thousandth"), (0.999, "just below the limit")):
        found, _, _ = bench.measured(batch, optim={"max_grad_norm": norm / share})
        near(norm_of(found), norm / max(share, 1.0), 3e-4 + bench.gradient_tolerance / 10, f"norm {what}")
    huge = batch.with_columns({"weights": batch["weights"] * (1e8 / norm)})
    found, _, _ = bench.measured(huge, optim={"max_grad_norm": norm})
    same_direction(found, expected, bench.gradient_tolerance, "gradient clipped from a norm of 1e8")
    engine = bench.engine(optim={"lr": 0.0})
    for size in (1e-9, 1e-5, 3e4, 1e8):
        larger = batch.with_columns({"weights": batch["weights"] * (size / norm)})
        step = bench.step(engine, larger)
        assert not step.skipped, f"A step with a gradient of norm {size:g} is skipped."
        near(
            step.grad_norm, size, max(bench.norm_tolerance, 1e-5), f"grad_norm of a gradient of norm {size:g}"
        )


@contract(
    catches=(
        "biases left out of the gradient",
        "norm weights of 1 assumed",
        "biases of 0 assumed",
        "dropout in training",
        "a sliding window one token too long",
    )
)
def other_models_are_as_right_as_the_first(bench: TrainBench) -> None:
    """A model of another family also has the weights, outputs, gradient and export of the reference.

    They are untied, with biases, norm weights that are not 1, and dropout and a sliding window in their config.
    """
    for path in bench.other_models():
        batch = bench.batch(ODD, seed=1, temperature=0.9)
        module = bench.reference(path)
        expected = gradient_of(module, nll_loss(module, batch))
        found, _, _ = bench.measured(batch, path=path)
        same_direction(found, expected, bench.gradient_tolerance, "gradient of another model")
        engine = bench.engine(path=path)
        weights, published_ = bench.weights(engine), published(path)
        assert weights.keys() == published_.keys(), (
            f"named_weights of another model has other names: {sorted(weights.keys() ^ published_.keys())[:5]}."
        )
        for name, value in published_.items():
            close(weights[name], value, rounding(weights[name]), f"weight '{name}' of another model")
        with torch.no_grad():
            outputs = outputs_of(module, batch)
        for name, values in bench.infer(engine, batch, ("log_probs", "entropy")).items():
            close(values, outputs[name], 5 * bench.tolerance, f"{name} of another model")
        bench.step(engine, batch)
        folder = bench.folder / f"export-{len(path)}"
        engine.export(folder)
        bench.barrier()
        identical(published(folder), bench.weights(engine), "exported weights of another model")
        with torch.no_grad():
            outputs = outputs_of(bench.reference(str(folder)), batch)
        found = bench.infer(engine, batch)
        close(found["log_probs"], outputs["log_probs"], 10 * bench.tolerance, "log_probs of its export")


@contract(
    catches=(
        "one buffer for all weights of a stream",
        "weights of the batch scaled in place",
        "a column taken out of the batch",
        "a step draws random numbers",
        "the outputs of an earlier call overwritten",
        "tensors of a stream overwritten by a forward pass",
    )
)
def what_is_passed_and_given_stays_as_it_is(bench: TrainBench) -> None:
    """No call changes the batch that it gets, or draws from a random number generator.

    Outputs of ``infer`` stay valid, and tensors of ``named_weights`` until the weights change.
    """
    engine, batch = bench.engine(budget=24), probed(bench.batch(temperature=0.8), "log_probs")
    batch.tokens.pop("support_ids")
    share = bench.share(engine, batch)[1]
    tokens = {name: value.clone() for name, value in share.tokens.items()}
    ids, lengths = share.token_ids.clone(), share.lengths.clone()
    numpy: Any = sys.modules["numpy"]  # imported by transformers
    state = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state()[1:3])
    outputs = engine.infer(share, ["log_probs", "entropy"])
    given = {name: value.clone() for name, value in outputs.items()}
    engine.forward_backward(share, NLL)
    engine.forward_backward(share, LossCall(PROBE))
    engine.optimizer_step()
    held = list(engine.named_weights())
    taken = bench.weights(engine)
    engine.infer(share, ["log_probs", "entropy"])
    identical(outputs, given, "outputs of infer after another call")
    identical({name: value.detach().cpu() for name, value in held}, taken, "tensors of a stream at its end")
    changed = [
        name for name in tokens if not torch.equal(share.tokens.get(name, torch.zeros(0)), tokens[name])
    ]
    assert not changed, f"Columns of the batch are changed in place: {changed}."
    added = sorted(share.tokens.keys() - tokens.keys())
    assert not added, f"Columns are added to the batch that was passed: {added}."
    assert torch.equal(share.token_ids, ids), "token_ids of the batch are changed in place."
    assert torch.equal(share.lengths, lengths), "lengths of the batch are changed in place."
    assert share.temperature == 0.8, f"The batch's temperature is changed to {share.temperature}."
    assert torch.equal(torch.get_rng_state(), state[0]), "A step draws from torch's generator."
    assert random.getstate() == state[1], "A step draws from Python's generator."
    assert str(numpy.random.get_state()[1:3]) == state[2], "A step draws from numpy's generator."
