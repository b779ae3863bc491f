"""Contracts of LoRA adapters of other models and roles, and of options that the contracts of ``train_adapters`` leave out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from engine_core.types import LossCall
from engine_plugin_testing.contracts import close, contract, near, refused, same_direction
from engine_plugin_testing.reference import gradient_of, norm_of, outputs_of, published
from engine_plugin_testing.train_adapters import LORA, PREFIX, A, B, adapted, adapter_of, takes_adapters
from engine_plugin_testing.train_bench import MEASURE, rounding

if TYPE_CHECKING:
    from engine_plugin_testing.train_bench import TrainBench

SCALE = LORA.alpha / LORA.rank


@contract(
    capability="lora",
    package="peft",
    catches=(
        "the first weights of an adapter always kaiming",
        "a pattern of target_modules searched instead of matched",
        "layers whose names end in a part of target_modules",
        "biases of adapted layers left out of merged weights",
    ),
)
def options_and_models_of_adapters_are_those_asked_for(bench: TrainBench) -> None:
    """``init = "gaussian"`` draws A from N(0, 1 / rank^2), and a pattern in ``target_modules`` matches whole names of layers.

    In a model with biases, dropout and norm weights that are not 1, merged weights and log-probs are those of base and adapter.
    """
    if not takes_adapters(bench):
        return
    plain = adapter_of(bench.engine(lora=LORA))
    drawn = adapter_of(bench.engine(lora=LORA.model_copy(update={"init": "gaussian"})))
    values = torch.cat([value.flatten().double() for name, value in drawn.items() if name.endswith(A)])
    near(float(values.std()), 1 / LORA.rank, 0.1, "standard deviation of A with init = 'gaussian'")
    outside = float((values.abs() > 2 / LORA.rank).double().mean())
    near(outside, 0.0455, 0.4, "share of A outside of two standard deviations with init = 'gaussian'")
    name = min(name.removeprefix(PREFIX).removesuffix(A) for name in plain if name.endswith(A))
    engine = bench.engine(lora=LORA.model_copy(update={"target_modules": re.escape(name)}))
    expected = sorted(f"{PREFIX}{name}{half}" for half in (A, B))
    assert sorted(adapter_of(engine)) == expected, (
        f"target_modules = '{re.escape(name)}' gives the tensors {sorted(adapter_of(engine))[:5]}; expected {expected}."
    )
    for part in (re.escape(name[1:-1]), [name.rpartition(".")[2][1:]]):
        with refused(f"target_modules = '{part}', which is no whole name,"):
            bench.engine(lora=LORA.model_copy(update={"target_modules": part}))
    _compare_other_model(bench)


def _compare_other_model(bench: TrainBench) -> None:
    """Train an adapter of the second model, and compare merged weights and log-probs."""
    path, batch = bench.other_models()[-1], bench.batch((9, 31, 4), seed=1)
    engine = bench.engine(path=path, lora=LORA, optim={"lr": 2e-2}, budget=24)
    for _ in range(2):
        bench.step(engine, batch)
    merged = adapted(published(path), adapter_of(engine), SCALE)
    found = bench.weights(engine)
    assert found.keys() == merged.keys(), (
        f"Merged weights of another model have other names: {sorted(found.keys() ^ merged.keys())[:5]}."
    )
    for name, value in found.items():
        close(value, merged[name], max(1e-5, 2 * rounding(value)), f"merged weight '{name}' of another model")
    with torch.no_grad():
        expected = outputs_of(bench.reference(path, merged), batch)["log_probs"]
    close(
        bench.infer(engine, batch)["log_probs"], expected, 10 * bench.tolerance, "log_probs of another model"
    )


@contract(
    role="critic",
    capability="lora",
    package="peft",
    catches=("a new value head that is not trained with an adapter",),
)
def an_adapter_of_a_critic_trains_its_head(bench: TrainBench) -> None:
    """A critic with an adapter trains the adapter and its new head: gradients and values are those of a float64 reference."""
    if not takes_adapters(bench) or bench.settings["reference"]:
        return
    batch = bench.batch()
    engine = bench.engine(role="critic", lora=LORA, optim={**MEASURE, "weight_decay": 0.0}, budget=24)
    before, first = bench.weights(engine), adapter_of(engine)
    module = bench.value_reference(before)
    assert module is not None
    values = module.outputs_of(batch)["values"]
    close(bench.infer(engine, batch, ("values",))["values"], values.detach(), bench.tolerance, "values")
    batch = batch.with_columns({"returns": values.detach().float() + 1, "values": values.detach().float()})
    loss = (batch["weights"] * (values - batch["returns"]) ** 2 / 2).sum()
    gradient = gradient_of(module, loss)
    expected = {
        name: SCALE * gradient[f"{layer}.weight"] @ first[f"{PREFIX}{layer}{A}"].double().T
        for name in first
        if name.endswith(B)
        for layer in [name.removeprefix(PREFIX).removesuffix(B)]
    }
    heads = {name for name in before if f"{PREFIX}{name}" in first}
    assert heads, f"The adapter of a critic has no head: {sorted(first)[-3:]}."
    expected |= {f"{PREFIX}{name}": gradient[name] for name in heads}
    step = bench.step(engine, batch, LossCall("value", {"value_clip": None}, outputs=("values",)))
    near(step.grad_norm, norm_of(expected), bench.gradient_tolerance, "grad_norm of a critic's adapter")
    after, found = adapter_of(engine), {}
    for name in expected:
        change = first[name].double() - after[name].double()
        found[name] = (
            change / (1 - change.abs()).clamp(min=1e-6) if bench.settings["optimizer"] == "adamw" else change
        )
    same_direction(found, expected, bench.gradient_tolerance, "gradient of a critic's adapter")
    changed = bench.value_reference(bench.weights(engine))
    assert changed is not None
    with torch.no_grad():
        values = changed.outputs_of(batch)["values"]
    close(
        bench.infer(engine, batch, ("values",))["values"], values, 10 * bench.tolerance, "values after a step"
    )
