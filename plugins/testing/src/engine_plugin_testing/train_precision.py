"""Contracts of a forward pass in bfloat16 or float16 above float32 weights: what is rounded, and what must not be."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from engine_plugin_testing.contracts import close, contract, identical, near, same_direction
from engine_plugin_testing.reference import (
    gradient_of,
    logits_of,
    nll_loss,
    norm_of,
    outputs_of,
    published,
)
from engine_plugin_testing.train_adapters import LORA, adapted, adapter_of, takes_adapters
from engine_plugin_testing.train_bench import MEASURE, POLICY, TrainBench

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.contracts.engines import TrainEngine
    from engine_core.types import Batch

FAR = 0.2  # nats: most that bfloat16 moves a log-prob of the tiny model
STEP = 1e-6  # far less than bfloat16 resolves
FP16 = 0.05  # most that float16 moves a gradient of the tiny model, as a share of its norm


@contract(
    catches=(
        "a compute type that is ignored",
        "a module lent without the compute type",
        "weights rounded to the compute type in a stream",
        "a step that is rounded to the compute type",
        "received weights rounded to the compute type",
        "an adapter merged in the compute type",
    ),
    setting="in_bf16",
)
def computing_in_bf16_rounds_no_weight(bench: TrainBench) -> None:
    """The options ``in_bf16`` of a suite put the forward pass in bfloat16, and leave weights, steps and streams in float32.

    ``infer``, ``forward_backward`` and a module that is lent compute alike: their log-probs differ by less than rounding
    moves them.
    """
    batch = bench.batch((9, 31, 4, 12), seed=3)
    optim = {**MEASURE, "lr": STEP, "eps": 1e-30}
    engine = bench.engine(optim=optim, options=bench.settings["in_bf16"], budget=24)
    before, folder = bench.weights(engine), published(bench.model())
    identical(before, folder, "float32 weights that are computed with in bfloat16")
    module = bench.reference()
    with torch.no_grad():
        expected = outputs_of(module, batch)["log_probs"]
    found = bench.infer(engine, batch)["log_probs"]
    close(found, expected, FAR, "log_probs in bfloat16")
    _check_lent(bench, engine, batch, found, expected)
    columns = {"rollout_log_probs": found}
    gap = bench.forward_backward(engine, batch.with_columns(columns), POLICY).metrics["max/mismatch/max_abs"]
    assert gap == 0, f"The log-probs of infer and of forward_backward in bfloat16 differ by up to {gap:.3g}."
    engine.optimizer_step()
    bench.forward_backward(engine, batch)
    before = bench.weights(engine)
    engine.optimizer_step()
    after = bench.weights(engine)
    _check_moves(before, after)
    other = bench.engine(options=bench.settings["in_bf16"], path=bench.model(seed=1))
    other.load_named_weights(after.items())
    identical(bench.weights(other), after, "weights that were loaded into an engine in bfloat16")
    _compare_gradient(bench, batch)
    if "lora" in bench.capabilities and importlib.util.find_spec("peft") and takes_adapters(bench):
        _check_adapter(bench, batch)


def _check_lent(
    bench: TrainBench, engine: TrainEngine, batch: Batch, found: Tensor, expected: Tensor
) -> None:
    """Check that log-probs [T] of ``infer`` are in bfloat16, and those of a module that is lent are the same but for rounding."""
    mask = batch["loss_mask"]
    rounded = float((found - expected)[mask].norm())
    assert float((found - expected).abs().max()) > 1e-4, (
        "The log-probs are too exact for a forward pass in bfloat16."
    )
    if "generation_module" not in bench.capabilities:
        return
    rows = []
    with engine.generation_module() as module:
        for ids in batch.token_ids.split(batch.lengths.tolist()):
            logits = logits_of(module, ids.to(next(module.parameters()).device)).float().cpu()
            chosen = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None]).squeeze(1)
            rows.append(torch.cat([chosen.new_zeros(1), chosen]))
    apart = float((torch.cat(rows) - found)[mask].norm())
    assert apart <= 0.5 * rounded, (
        f"Log-probs of the module that is lent differ from those of infer by {apart:.3g} (norm), and infer's from float64 "
        f"by {rounded:.3g}: the two do not compute alike."
    )


def _check_moves(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Check that a tiny step moved the weights [D_1, D_2, ...] as far as float32 shows it."""
    for name, old in before.items():
        assert after[name].dtype == torch.float32, f"'{name}' is {after[name].dtype}; expected float32."
        moved = (after[name].double() - old.double()).abs()
        fine = (old.abs() < 0.5) & (moved > 0)
        share = float(fine.sum()) / max(1, int((old.abs() < 0.5).sum()))
        assert not int((old.abs() < 0.5).sum()) or share > 0.02, (
            f"A step of {STEP} moved {share:.1%} of '{name}': steps are rounded away."
        )
        most = float(moved[fine].max()) if bool(fine.any()) else 0.0
        assert most < 4 * STEP, f"A step of {STEP} moved a value of '{name}' by {most:.3g}: it is rounded."


def _compare_gradient(bench: TrainBench, batch: Batch) -> None:
    """Compare the gradient with the reference's, as far as bfloat16 allows."""
    module = bench.reference()
    engine = bench.engine(optim=MEASURE, options=bench.settings["in_bf16"])
    before = bench.weights(engine)
    bench.step(engine, batch)
    expected = gradient_of(module, nll_loss(module, batch))
    same_direction(bench.gradient(engine, before), expected, 0.1, "gradient computed in bfloat16")


def _check_adapter(bench: TrainBench, batch: Batch) -> None:
    """Check that an adapter is merged, streamed and lent as it is computed with."""
    engine = bench.engine(lora=LORA, optim={"lr": 2e-2}, options=bench.settings["in_bf16"])
    bench.step(engine, batch)
    base, tensors = published(bench.model()), adapter_of(engine)
    odd = [name for name, value in tensors.items() if value.dtype != torch.float32]
    assert not odd, f"Tensors of an adapter are not float32: {odd[:3]}."
    lora = engine.config.lora or LORA
    merged = adapted(base, tensors, lora.alpha / lora.rank)
    for name, value in bench.weights(engine).items():
        close(value, merged[name], 1e-5, f"'{name}', merged in an engine that computes in bfloat16")
    with torch.no_grad():
        expected = outputs_of(bench.reference(weights=merged), batch)["log_probs"]
    found = bench.infer(engine, batch)["log_probs"]
    close(found, expected, FAR, "log_probs with an adapter in bfloat16")
    _check_lent(bench, engine, batch, found, expected)


@contract(
    catches=(
        "a loss scale that is not saved",
        "an overflow that lowers no loss scale",
        "an overflow that is not reported",
        "gradients clipped before they are unscaled",
    ),
    setting="in_fp16",
)
def an_overflow_in_fp16_lowers_the_loss_scale(bench: TrainBench) -> None:
    """A step that overflows in fp16 is skipped, is reported as ``rescaled``, and lowers the loss scale.

    A run that resumes after such a step needs as many of them as one that never stopped. The first good step has the norm of a
    float64 gradient, and is clipped to ``max_grad_norm``.
    """
    batch, module = bench.batch(), bench.reference()
    expected = gradient_of(module, nll_loss(module, batch))
    norm = norm_of(expected)
    optim = {**MEASURE, "max_grad_norm": norm / 4}
    straight, resumed = (bench.engine(optim=optim, options=bench.settings["in_fp16"]) for _ in range(2))
    before = bench.weights(straight)
    for _ in range(2):
        step = bench.step(straight, batch)
        assert (step.skipped, step.rescaled) == (True, True), f"A gradient overflows in fp16; {step}."
    identical(bench.weights(straight), before, "weights after steps that overflow")
    straight.save(bench.folder / "overflow").result()
    bench.barrier()
    resumed.load(bench.folder / "overflow")
    counts = []
    for engine in (straight, resumed):
        steps = [bench.step(engine, batch)]
        while steps[-1].skipped:
            assert steps[-1].rescaled, f"A gradient overflows in fp16; {steps[-1]}."
            assert len(steps) < 40, f"{len(steps)} steps lower the loss scale, and gradients still overflow."
            steps.append(bench.step(engine, batch))
        counts.append(len(steps))
        near(steps[-1].grad_norm, norm, FP16, "grad_norm of the first step that does not overflow")
        clipped = {name: value / 4 for name, value in expected.items()}
        same_direction(bench.gradient(engine, before), clipped, FP16, "gradient computed in fp16, clipped")
    assert counts[0] == counts[1], (
        f"A good step comes after {counts[0]} more steps, and in the run that resumes after {counts[1]}: its loss scale is another."
    )
