"""Contracts of roles besides the actor, critic and reward model, and of LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine_core.config.roles import LoRAConfig
from engine_core.types import LossCall
from engine_plugin_testing.contracts import close, contract, identical, near, same_direction
from engine_plugin_testing.probes import PROBE
from engine_plugin_testing.reference import (
    gradient_of,
    nll_loss,
    norm_of,
    outputs_of,
    published,
)
from engine_plugin_testing.train_bench import MEASURE, NLL, TrainBench, rounding

LORA = LoRAConfig(rank=4, alpha=12.0)
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


@contract(
    role="critic",
    catches=(
        "a value head that is not trained",
        "a value loss without its half",
        "the old value without its clip",
    ),
)
def the_value_gradient_equals_the_reference(bench: TrainBench) -> None:
    """A critic's values, its clipped value loss and the gradient equal those of the reference.

    ``values`` are the head on the hidden state of the token before, in float64. A saved critic is loaded.
    """
    batch = bench.batch()
    engine = bench.engine(role="critic", optim=MEASURE, budget=24)
    before = bench.weights(engine)
    module = bench.value_reference(before)
    if module is None:
        values = bench.infer(engine, batch, ("values",))["values"].double()
    else:
        values = module.outputs_of(batch)["values"]
    close(bench.infer(engine, batch, ("values",))["values"], values.detach(), bench.tolerance, "values")
    generator = torch.Generator().manual_seed(9)
    old = values.detach() + 0.4 * torch.randn(batch.num_tokens, generator=generator)
    far = (values.detach() - old).abs() - 0.2
    old = torch.where(far.abs() < 0.05, values.detach(), old).float()  # none at the clip's edge
    returns = (values.detach() + torch.randn(batch.num_tokens, generator=generator)).float()
    columns = {"returns": returns, "values": old, "weights": 4 * batch["weights"]}
    batch = batch.with_columns(columns)
    clipped = torch.minimum(torch.maximum(values, old - 0.2), old.double() + 0.2)
    errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2
    loss = (batch["weights"] * errors).sum()
    call = LossCall("value", {"value_clip": 0.2}, outputs=("values",))
    near(
        bench.forward_backward(engine, batch, call).loss,
        float(loss.detach()),
        20 * bench.tolerance,
        "value loss",
    )
    step = engine.optimizer_step()
    if module is not None:
        gradient = gradient_of(module, loss)
        near(step.grad_norm, norm_of(gradient), bench.gradient_tolerance, "norm of the value loss")
        _same_gradient(bench, bench.gradient(engine, before), gradient, before, "gradient of the value loss")
    after = bench.infer(engine, batch, ("values",))["values"]
    engine.save(bench.folder / "critic").result()
    bench.barrier()
    other = bench.engine(role="critic", path=bench.model(seed=1), optim=MEASURE)
    other.load(bench.folder / "critic")
    close(
        bench.infer(other, batch, ("values",))["values"],
        after,
        bench.tolerance / 10,
        "values of a loaded critic",
    )


@contract(role="reward_model", catches=("scores read at the token before", "scores of the last token alone"))
def scores_and_their_gradient_equal_the_reference(bench: TrainBench) -> None:
    """A reward model's ``scores[t]`` and their gradient are those of its head on the hidden state of token t.

    This holds at every loss token, also the first of a sequence.
    """
    batch = bench.batch((9, 1, 12, 5))
    batch["loss_mask"][:3] = True
    batch["loss_mask"][9] = True
    engine = bench.engine(role="reward_model", optim=MEASURE, budget=16)
    before = bench.weights(engine)
    module = bench.value_reference(before)
    if module is None:
        return  # nothing to compare scores with
    scores = module.outputs_of(batch)["scores"]
    close(bench.infer(engine, batch, ("scores",))["scores"], scores.detach(), bench.tolerance, "scores")
    generator = torch.Generator().manual_seed(9)
    columns = {
        name: torch.randn(batch.num_tokens, generator=generator) for name in ("probe/scores", "probe/metric")
    }
    columns["probe/scores"] *= batch["loss_mask"] / 10
    batch = batch.with_columns(columns)
    gradient = gradient_of(module, (batch["probe/scores"] * scores).sum())
    step = bench.step(engine, batch, LossCall(PROBE, outputs=("scores",)))
    near(step.grad_norm, norm_of(gradient), bench.gradient_tolerance, "norm of the gradient of scores")
    _same_gradient(bench, bench.gradient(engine, before), gradient, before, "gradient of scores")


def _same_gradient(
    bench: TrainBench,
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    before: dict[str, Tensor],
    what: str,
) -> None:
    """Compare gradients read off weights that are fine enough to show them: float32."""
    fine = {name for name, value in before.items() if value.dtype.itemsize >= 4}
    found, expected = ({n: v for n, v in each.items() if n in fine} for each in (found, expected))
    same_direction(found, expected, bench.gradient_tolerance, what)


@contract(
    capability="lora",
    package="peft",
    catches=(
        "the base trained under an adapter",
        "an adapter without its alpha",
        "an adapter that infer cannot leave out",
        "an adapter merged twice",
        "one half of an adapter streamed",
        "one half of an adapter trained at another rate",
    ),
)
def an_adapter_alone_is_trained(bench: TrainBench) -> None:
    """With ``[actor.lora]`` the adapter is trained and the base is not.

    ``B`` gets ``scale G A^T`` of the model's float64 gradient ``G``, and ``A`` gets ``scale B^T G``. Merged weights are
    ``W + scale B A``, and another engine takes the adapter.
    """
    batch, module = bench.batch(), bench.reference()
    engine = bench.engine(lora=LORA, optim={**MEASURE, "weight_decay": 0.0}, budget=24)
    scale = (engine.config.lora or LORA).alpha / (engine.config.lora or LORA).rank
    base = {name: value.detach().clone() for name, value in module.named_parameters()}
    first = adapter_of(engine)
    layers = sorted(name.removeprefix(PREFIX).removesuffix(A) for name in first if name.endswith(A))
    assert layers, f"The adapter has no tensors named '{PREFIX}...{A}': {sorted(first)[:3]}."
    with torch.no_grad():
        plain = outputs_of(module, batch)["log_probs"]
    close(bench.infer(engine, batch)["log_probs"], plain, bench.tolerance, "log_probs with a new adapter")
    gradient = gradient_of(module, nll_loss(module, batch))
    expected = {
        layer: scale * gradient[f"{layer}.weight"] @ first[f"{PREFIX}{layer}{A}"].double().T
        for layer in layers
    }
    step = bench.step(engine, batch)
    near(step.grad_norm, norm_of(expected), bench.gradient_tolerance, "grad_norm of an adapter")
    second = adapter_of(engine)
    found = _gradients(bench, first, second)
    found = {layer: found[f"{PREFIX}{layer}{B}"] for layer in layers}
    same_direction(found, expected, bench.gradient_tolerance, "gradient of an adapter's B")
    bench.step(engine, batch, NLL)
    third, merged = adapter_of(engine), bench.weights(engine)
    same = [
        layer for layer in layers if torch.equal(third[f"{PREFIX}{layer}{A}"], first[f"{PREFIX}{layer}{A}"])
    ]
    assert not same, f"A of the adapter is not trained: {same[:3]}."
    for name, value in adapted(base, third, scale).items():
        close(
            merged[name], value, max(1e-5, 2 * rounding(merged[name])), f"weight '{name}' of base and adapter"
        )
    changed = bench.reference(weights=merged)
    with torch.no_grad():
        expected_ = outputs_of(changed, batch)["log_probs"]
    close(
        bench.infer(engine, batch)["log_probs"], expected_, 10 * bench.tolerance, "log_probs with the adapter"
    )
    without = bench.infer(engine, batch, adapter=False)["log_probs"]
    close(without, plain, bench.tolerance, "log_probs with adapter=False")
    other = bench.engine(lora=LORA, optim={**MEASURE, "weight_decay": 0.0})
    other.load_named_weights((name, third[name]) for name in sorted(third))
    identical(adapter_of(other), third, "adapter that was loaded")
    engine.export(bench.folder / "adapter", adapter=True)
    bench.barrier()
    identical(published(bench.folder / "adapter"), third, "exported adapter")
    gradient = gradient_of(changed, nll_loss(changed, batch))
    halves = {}
    for layer in layers:
        a, b = (third[f"{PREFIX}{layer}{half}"].double() for half in (A, B))
        halves[f"{PREFIX}{layer}{A}"] = scale * b.T @ gradient[f"{layer}.weight"]
        halves[f"{PREFIX}{layer}{B}"] = scale * gradient[f"{layer}.weight"] @ a.T
    bench.step(other, batch)
    found = _gradients(bench, third, adapter_of(other))
    same_direction(found, halves, bench.gradient_tolerance, "gradient of an adapter's halves")


def _gradients(
    bench: TrainBench, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradients [D_1, D_2, ...] that a first step with ``MEASURE`` has taken."""
    change = {name: before[name].double() - after[name].double() for name in before}
    if bench.settings["optimizer"] == "adamw":
        change = {name: value / (1 - value.abs()).clamp(min=1e-6) for name, value in change.items()}
    return change


def adapted(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return ``W + scale B A`` in float64, by the names of the base; weights without an adapter as they are.

    Args:
        base: weights [D_1, D_2, ...] by name.
        adapter: ``A: [R, in]`` and ``B: [out, R]`` by their names in an adapter file.
        scale: ``alpha / rank``.
    """
    found = {}
    for name, value in base.items():
        a, b = (adapter.get(f"{PREFIX}{name.removesuffix('.weight')}{half}") for half in (A, B))
        found[name] = value.double()
        if a is not None and b is not None:
            found[name] = found[name] + scale * b.double() @ a.double()
    return found


def adapter_of(engine: object) -> dict[str, Tensor]:
    """Return copies of an adapter's tensors on the CPU: ``A: [R, in]`` and ``B: [out, R]`` by name."""
    found = engine.named_weights(adapter=True)  # type: ignore[attr-defined]
    return {name: value.detach().to("cpu", copy=True) for name, value in found}
