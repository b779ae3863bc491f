"""Contracts of LoRA adapters."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from engine_core.config.roles import LoRAConfig
from engine_core.contracts.engines import TrainEngine
from engine_core.contracts.weight_sync import ADAPTER_CONFIG
from engine_core.errors import EngineError
from engine_plugin_testing.contracts import close, contract, identical, near, refused, same_direction
from engine_plugin_testing.reference import (
    VOCABULARY,
    as_published,
    gradient_of,
    nll_loss,
    norm_of,
    outputs_of,
    published,
)
from engine_plugin_testing.train_bench import MEASURE, NLL, rounding

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from engine_core.types import Batch
    from engine_plugin_testing.train_bench import TrainBench

LORA = LoRAConfig(rank=4, alpha=11.5)  # no whole number
WHOLE_HEAD: Mapping[str, Any] = {"modules_to_save": ["lm_head"]}
ENDS: Mapping[str, Any] = {"rslora": True, "target_modules": ["embed_tokens", "q_proj", "lm_head"]}
KINDS: tuple[Mapping[str, Any], ...] = ({}, ENDS, {"dora": True}, WHOLE_HEAD)
"""Tables of ``[actor.lora]``, besides rank and alpha."""
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


@contract(
    capability="lora",
    package="peft",
    catches=(
        "the base trained under an adapter",
        "an adapter without its alpha",
        "an alpha cut to a whole number",
        "an adapter that infer cannot leave out",
        "an adapter merged twice",
        "only one half of an adapter streamed",
        "one half of an adapter trained at another rate",
        "a new adapter that model.seed does not decide",
    ),
)
def an_adapter_alone_is_trained(bench: TrainBench) -> None:
    """With ``[actor.lora]``, only the adapter is trained, and the base stays unchanged.

    ``B`` gets ``scale G A^T`` of the model's float64 gradient ``G``, and ``A`` gets ``scale B^T G``. Merged weights are
    ``W + scale B A``, and another engine takes the adapter.
    """
    if not takes_adapters(bench):
        return
    batch, module = bench.batch(), bench.reference()
    engine = bench.engine(lora=LORA, optim={**MEASURE, "weight_decay": 0.0}, budget=24)
    scale = (engine.config.lora or LORA).alpha / (engine.config.lora or LORA).rank
    base = as_published(module, {name: value.detach().clone() for name, value in module.named_parameters()})
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
    identical(adapter_of(other), first, "a new adapter from the same model.seed")
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


def takes_adapters(bench: TrainBench) -> bool:
    """Return whether the model has a linear layer besides its head; a model of the suite's own may have none."""
    from torch import nn

    layers = bench.reference().named_modules()
    return any(isinstance(layer, nn.Linear) and layer.out_features != VOCABULARY for _, layer in layers)


def _tables(bench: TrainBench) -> Iterator[tuple[LoRAConfig, str]]:
    """Yield the tables of the suite's ``lora`` that fit its model, each with its name in messages."""
    for keys in bench.settings["lora"] if takes_adapters(bench) else ():
        if bench.settings["write_model"]:  # the layers of such a model may have other names
            if keys == WHOLE_HEAD:
                continue
            keys = {key: value for key, value in keys.items() if key != "target_modules"}
        yield LORA.model_copy(update=dict(keys)), f"with [actor.lora] {json.dumps(keys)}"


def _trained(bench: TrainBench, path: str, lora: LoRAConfig) -> TrainEngine:
    """Build an engine with an adapter and train it for two steps."""
    engine = bench.engine(path=path, lora=lora, optim={"lr": 2e-2})
    for number in range(2):
        bench.step(engine, bench.batch(seed=number))
    return engine


def _log_probs(bench: TrainBench, path: str, weights: Mapping[str, Tensor] | None, batch: Batch) -> Tensor:
    """Compute the reference's log-probs [T] of the model in ``path``, with other weights if they are given."""
    with torch.no_grad():
        return outputs_of(bench.reference(path, weights), batch)["log_probs"]


@contract(
    capability="lora",
    package="peft",
    catches=(
        "modules trained whole that stay without the adapter",
        "alpha / rank with rslora",
        "row magnitudes (DoRA) left out of merged weights",
        "modules trained whole exported as they were",
        "row magnitudes (DoRA) that are not trained",
        "a kind of adapter that is ignored",
        "an adapter that is not trained once it was off",
        "an adapter that stays off after an error",
        "an adapter that is on again within without_adapter",
        "an outdated adapter exported",
        "an adapter on other layers than those asked for",
        "rslora of an adapter's folder ignored",
    ),
)
def every_kind_of_adapter_is_that_of_peft(bench: TrainBench) -> None:
    """For each table of ``lora``, policy and gradient are the same as in peft with the exported adapter.

    Merged weights, streamed and exported, have the same log-probs, and so has an engine that continues the exported
    adapter. Without the adapter the log-probs are the base's. What the suite takes out of ``lora`` raises an error.
    """
    batch, path = bench.batch(), bench.model(tied=False)
    plain = _log_probs(bench, path, None, batch)
    for keys in () if bench.settings["write_model"] else KINDS:
        if keys not in bench.settings["lora"]:
            with refused(f"[actor.lora] {json.dumps(keys)}, which `lora` of the suite lacks,"):
                bench.engine(path=path, lora=LORA.model_copy(update=dict(keys)))
    for number, (lora, what) in enumerate(_tables(bench)):
        engine = _trained(bench, path, lora)
        found = bench.infer(engine, batch)["log_probs"]
        assert float((found - plain).abs().max()) > 0.01, f"Two steps {what} change no log-prob."
        _check_off_and_on(bench, engine, batch, plain, found, what)
        before = adapter_of(engine)
        engine.export(bench.folder / f"before-{number}", adapter=True)
        bench.step(engine, batch)
        still = [name for name, value in adapter_of(engine).items() if torch.equal(value, before[name])]
        assert not still, f"A step after adapter=False leaves {still[:3]} as they were, {what}."
        found = bench.infer(engine, batch)["log_probs"]
        merged = bench.weights(engine)
        expected = _log_probs(bench, path, merged, batch)
        close(found, expected, 10 * bench.tolerance, f"log_probs of the merged weights, {what}")
        whole, folder = bench.folder / f"whole-{number}", bench.folder / f"adapter-{number}"
        engine.export(whole)
        engine.export(folder, adapter=True)
        bench.barrier()
        identical(published(whole), merged, f"exported weights {what}")
        tensors = adapter_of(engine)
        identical(published(folder), tensors, f"exported adapter {what}")
        _check_config((folder / ADAPTER_CONFIG).read_bytes(), lora, what)
        if type(engine).adapter_config is not TrainEngine.adapter_config:
            _check_config(engine.adapter_config(), lora, what)
        continued = bench.engine(path=path, lora=LoRAConfig(path=str(folder)))
        again = bench.infer(continued, batch)["log_probs"]
        close(
            again,
            found,
            10 * bench.tolerance,
            f"log_probs of an engine with path = the exported adapter, {what}",
        )
        module = _of_peft(bench, path, folder)
        if module is None:
            continue
        with torch.no_grad():
            expected = outputs_of(module, batch)["log_probs"]
        close(found, expected, 10 * bench.tolerance, f"log_probs of peft with the exported adapter, {what}")
        measured = bench.engine(path=path, lora=lora, optim={**MEASURE, "weight_decay": 0.0})
        measured.load_named_weights(tensors.items())
        gradient = gradient_of(module, nll_loss(module, batch))
        names = {name: _file_name(name) for name, value in module.named_parameters() if value.requires_grad}
        step = bench.step(measured, batch)
        gradient = {names[name]: gradient[name] for name in names}
        near(step.grad_norm, norm_of(gradient), bench.gradient_tolerance, f"grad_norm {what}")
        taken = _gradients(bench, tensors, adapter_of(measured))
        same_direction(taken, gradient, bench.gradient_tolerance, f"gradient of an adapter {what}")


def _check_off_and_on(
    bench: TrainBench, engine: TrainEngine, batch: Batch, plain: Tensor, found: Tensor, what: str
) -> None:
    """Check that log-probs [T] without the adapter are ``plain``, and ``found`` again after an error while it was off."""
    without = bench.infer(engine, batch, adapter=False)["log_probs"]
    close(without, plain, bench.tolerance, f"log_probs with adapter=False, {what}")
    with engine.without_adapter():
        bench.infer(engine, batch, adapter=False)
        without = bench.infer(engine, batch)["log_probs"]
    close(without, plain, bench.tolerance, f"log_probs in without_adapter, {what}")
    with contextlib.suppress(KeyError), engine.without_adapter():
        raise KeyError("an error while the adapter is off")
    batch.temperature, temperature = 0.0, batch.temperature
    with contextlib.suppress(Exception):
        bench.infer(engine, batch, adapter=False)
    batch.temperature = temperature
    close(bench.infer(engine, batch)["log_probs"], found, bench.tolerance, f"log_probs again, {what}")


def _check_config(data: bytes, lora: LoRAConfig, what: str) -> None:
    """Compare the bytes of an ``adapter_config.json`` with the table."""
    config = json.loads(data)
    asked, found = lora.target_modules, config["target_modules"]
    assert isinstance(asked, str) or sorted(found) == sorted(asked), (
        f"target_modules of the adapter's config are {found}; expected {asked}, {what}."
    )
    for key, expected in {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "modules_to_save": lora.modules_to_save,
    }.items():
        found = config.get(key) or type(expected)()
        assert found == expected, f"{key} of the adapter's config is {found}; expected {expected}, {what}."


def _of_peft(bench: TrainBench, path: str, folder: Path) -> nn.Module | None:
    """Return the reference in float64 with peft's layers and the adapter of a folder; None for a suite's own module."""
    from peft import PeftModel
    from transformers import PreTrainedModel

    module = bench.reference(path)
    if not isinstance(module, PreTrainedModel):
        return None
    made: Any = PeftModel.from_pretrained(module, folder, is_trainable=True, autocast_adapter_dtype=False)
    found: nn.Module = made.base_model.model
    return found.double().eval()


def _file_name(name: str) -> str:
    """Return the name in an adapter file of a parameter of peft's."""
    name = name.replace(".modules_to_save.default.", ".").removesuffix(".default")
    return PREFIX + name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector").replace(
        ".default.", "."
    )


@contract(
    capability="lora",
    package="peft",
    catches=(
        "modules trained whole that keep their values",
        "row magnitudes (DoRA) that keep their values",
        "the adapter of an embedding that keeps its values",
    ),
)
def a_whole_model_takes_the_place_of_an_adapter(bench: TrainBench) -> None:
    """After ``load_named_weights`` of a whole model, the engine is that model, and its adapter adds nothing.

    This holds for each table of ``lora``, for a share of the new weights and for all of them. Training continues.
    """
    batch, path = bench.batch(), bench.model(tied=False)
    other = published(bench.model(seed=1, tied=False))
    for lora, what in _tables(bench):
        engine = _trained(bench, path, lora)
        for mix in (0.25, 1.0):
            before = bench.weights(engine)
            engine.load_named_weights(iter(other.items()), mix=mix)
            found = bench.weights(engine)
            mixed = {n: (1 - mix) * v.double() + mix * other[n].double() for n, v in before.items()}
            for name, value in found.items():
                allowed = max(1e-5, 2 * rounding(value))
                close(value, mixed[name], allowed, f"weight '{name}' after mix={mix}, {what}")
            expected = _log_probs(bench, path, mixed, batch)
            for adapter in (True, False):
                close(
                    bench.infer(engine, batch, adapter=adapter)["log_probs"],
                    expected,
                    10 * bench.tolerance,
                    f"log_probs with adapter={adapter} after mix={mix}, {what}",
                )
            bench.step(engine, batch)
        after = bench.infer(engine, batch)["log_probs"]
        assert not torch.equal(after, expected.float()), (
            f"A step after a whole model changes nothing, {what}."
        )


@contract(
    capability="lora",
    package="peft",
    catches=(
        "mix ignored for an adapter",
        "more than half of an adapter taken whole",
        "an adapter that lacks tensors accepted",
    ),
)
def the_tensors_of_an_adapter_are_mixed_in_their_share(bench: TrainBench) -> None:
    """For each table of ``lora``, ``mix=s`` turns each tensor w of an adapter into ``(1 - s) w + s new``.

    Tensors that are unknown, missing or of another shape are refused.
    """
    if not takes_adapters(bench):
        return
    batch, path = bench.batch(), bench.model(tied=False)
    for number, (lora, what) in enumerate(_tables(bench)):
        engine, noise = _trained(bench, path, lora), torch.Generator().manual_seed(5)
        share = 0.7 if number % 2 else 0.25
        before = adapter_of(engine)
        new = {n: v + 0.1 * torch.randn(v.shape, generator=noise).to(v.dtype) for n, v in before.items()}
        engine.load_named_weights(((name, new[name]) for name in sorted(new)), mix=share)
        found = adapter_of(engine)
        assert found.keys() == before.keys(), f"The adapter has other tensors after a mix, {what}."
        for name, value in found.items():
            mixed = (1 - share) * before[name].double() + share * new[name].double()
            close(value, mixed, 2 * rounding(value), f"mixed '{name}' {what}")
        expected = _log_probs(bench, path, bench.weights(engine), batch)
        close(bench.infer(engine, batch)["log_probs"], expected, 10 * bench.tolerance, f"log_probs, {what}")
    first, last, unknown = min(new), max(new), f"{PREFIX}no.such.lora_A.weight"
    for mix in (1.0, 0.25):
        with refused(f"an adapter with an unknown tensor (mix={mix})", "no.such"):
            engine.load_named_weights([*new.items(), (unknown, torch.zeros(2))], mix=mix)
        with refused(f"an adapter without a tensor (mix={mix})", last.removeprefix(PREFIX)):
            engine.load_named_weights([(name, value) for name, value in new.items() if name != last], mix=mix)
        with refused(f"a tensor of another shape (mix={mix})", first.removeprefix(PREFIX)):
            engine.load_named_weights([(n, v[:1] if n == first else v) for n, v in new.items()], mix=mix)


@contract(
    capability="lora",
    package="peft",
    catches=("the optimizer state of an adapter not restored", "an adapter over another base"),
)
def a_run_with_an_adapter_resumes_over_its_base(bench: TrainBench) -> None:
    """After ``load`` over the same base, an adapter takes the same steps as in a run that never stopped.

    The loading engine has trained otherwise before. Over another base, with or without an adapter, ``load`` is refused, or
    brings the saved model back.
    """
    if not takes_adapters(bench):
        return
    batch, path = bench.batch(), bench.model(tied=False)
    for number, (lora, what) in enumerate(_tables(bench)):
        folder, optim = (
            bench.folder / f"state-{number}",
            {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2},
        )
        straight, resumed = (bench.engine(path=path, lora=lora, optim=optim) for _ in range(2))
        for _ in range(2):
            bench.step(straight, batch)
        bench.step(resumed, bench.batch((9, 31, 4), seed=7))
        straight.save(folder).result()
        bench.barrier()
        saved, tensors = bench.weights(straight), adapter_of(straight)
        resumed.load(folder)
        identical(adapter_of(resumed), tensors, f"adapter after load, {what}")
        for step in (3, 4):
            for engine in (straight, resumed):
                bench.step(engine, batch)
            tensors = adapter_of(straight)
            identical(adapter_of(resumed), tensors, f"adapter after step {step}, {what}", bench.exact)
    other = bench.model(seed=1, tied=False)
    bench.engine(path=path).save(bench.folder / "plain").result()
    bench.barrier()
    plain = published(path)
    cases = {
        "an adapter over another base": (bench.engine(path=other, lora=lora), folder, saved),
        "an adapter without an adapter": (bench.engine(path=path), folder, saved),
        "a whole model with an adapter": (bench.engine(path=path, lora=lora), bench.folder / "plain", plain),
    }
    for case, (engine, state, expected) in cases.items():
        try:
            engine.load(state)
        except EngineError:
            continue
        for name, value in bench.weights(engine).items():
            close(value, expected[name], rounding(value), f"weight '{name}' after load of {case}")
