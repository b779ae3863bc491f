"""Contracts of roles besides the actor: critic and reward model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_core.types import Batch, LossCall
from engine_plugin_testing.contracts import close, contract, identical, near, same_direction
from engine_plugin_testing.probes import PROBE
from engine_plugin_testing.reference import (
    gradient_of,
    norm_of,
    outputs_of,
    published,
)
from engine_plugin_testing.train_bench import MEASURE, TrainBench, rounding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_core.contracts.engines import TrainEngine


@contract(
    role="critic",
    catches=(
        "a value head that is not trained",
        "a value loss without its half",
        "the old value without its clip",
        "a new head instead of the folder's",
        "a new head that model.seed does not decide",
        "an override of the model that a critic ignores",
    ),
)
def the_value_gradient_equals_the_reference(bench: TrainBench) -> None:
    """A critic's values, clipped value loss and gradient equal the reference's.

    ``values`` are the head on the hidden state of the token before, in float64. A saved critic is loaded, and an exported one is
    built from its folder. A new head depends on ``model.seed`` alone. A ``[model] override`` applies to a critic too.
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
    torch.rand(7)  # a new head does not follow torch's random numbers
    other = bench.engine(role="critic", path=bench.model(seed=1), optim=MEASURE)
    later = bench.engine(role="critic", path=bench.model(seed=1), optim=MEASURE, seed=5)
    _compare_heads(before, bench.weights(other), bench.weights(later), published(bench.model()))
    _compare_override(bench, batch)
    other.load(bench.folder / "critic")
    close(
        bench.infer(other, batch, ("values",))["values"],
        after,
        bench.tolerance / 10,
        "values of a loaded critic",
    )
    close(
        _exported(bench, engine, batch, "critic", "values"),
        after,
        10 * bench.tolerance,
        "values of a critic built from its export",
    )


def _compare_override(bench: TrainBench, batch: Batch) -> None:
    """Compare the values of a critic with an override of its model's config; models without ``rms_norm_eps`` pass."""
    override: dict[str, Any] = {"rms_norm_eps": 0.5}
    config = json.loads(Path(bench.model(), "config.json").read_text("utf-8"))
    if bench.settings["reference"] or bench.settings["write_model"] or override.keys() - config.keys():
        return
    engine = bench.engine(role="critic", override=override)
    module = bench.value_reference(bench.weights(engine), bench.model(**override))
    assert module is not None
    values = module.outputs_of(batch)["values"].detach()
    found = bench.infer(engine, batch, ("values",))["values"]
    close(found, values, bench.tolerance, "values of a critic with an override")


@contract(
    role="critic",
    catches=(
        "a model given from Python that a critic shares with the actor",
        "the language-model head of a model given from Python as a value head",
        "the model folder read in place of a model given from Python",
        "a model given from Python left in training mode",
        "a module in training mode once it was lent",
    ),
)
def roles_of_a_model_given_from_python_are_apart(bench: TrainBench) -> None:
    """Actor, reference and critic of one module that is given from Python begin with its weights and share none.

    They equal those of its folder, also the critic's new head, and a step of the critic or the actor changes no other role.
    The module has dropout, and is in training mode. Empty with several ranks, and with a ``reference`` of the suite.
    """
    if bench.place.world_size > 1 or bench.settings["reference"]:
        return
    from transformers import AutoModelForCausalLM

    path, batch = bench.other_models()[-1], bench.batch(seed=2)
    given = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    elsewhere: Mapping[str, Any] = {"live": given, "optim": MEASURE, "budget": 24}
    critic, actor = bench.engine(role="critic", **elsewhere), bench.engine(**elsewhere)
    ref = bench.engine(role="ref", trainable=False, **elsewhere)
    own = bench.engine(role="critic", path=path, optim=MEASURE, budget=24)
    first, plain = bench.weights(critic), published(path)
    identical(first, bench.weights(own), "weights of a critic of a model given from Python")
    untouched = {engine: bench.weights(engine) for engine in (actor, ref)}
    for engine, weights in untouched.items():
        assert weights.keys() == plain.keys(), f"Other weights: {sorted(weights.keys() ^ plain.keys())[:5]}."
        for name, value in weights.items():
            close(
                value,
                plain[name],
                rounding(value),
                f"'{name}' of the {engine.context.role}, given from Python",
            )
    values = bench.infer(own, batch, ("values",))["values"]
    close(bench.infer(critic, batch, ("values",))["values"], values, bench.tolerance / 10, "values")
    with torch.no_grad():
        expected = outputs_of(bench.reference(path), batch)["log_probs"]
    batch = batch.with_columns({"returns": values + 1, "values": values})
    call = LossCall("value", {"value_clip": None}, outputs=("values",))
    steps = [bench.step(engine, batch, call) for engine in (critic, own)]
    near(steps[0].grad_norm, steps[1].grad_norm, bench.gradient_tolerance, "grad_norm of the critic")
    moved, expected_ = ({n: first[n] - v for n, v in bench.weights(e).items()} for e in (critic, own))
    _same_gradient(bench, moved, expected_, first, "step of a critic of a model given from Python")
    if "generation_module" in bench.capabilities:
        with actor.generation_module() as module:
            assert not module.training, "The module that is lent is in training mode."
    for engine, weights in untouched.items():
        what = f"weights of the {engine.context.role} after a step of the critic"
        identical(bench.weights(engine), weights, what)
        close(bench.infer(engine, batch)["log_probs"], expected, bench.tolerance, "log_probs")
    later = bench.weights(critic)
    bench.step(actor, batch)
    changed = bench.weights(actor)
    assert any(not torch.equal(value, changed[name]) for name, value in untouched[actor].items())
    identical(bench.weights(critic), later, "weights of the critic after a step of the actor")
    identical(bench.weights(ref), untouched[ref], "weights of the ref after a step of the actor")


def _compare_heads(
    first: dict[str, Tensor], same: dict[str, Tensor], other: dict[str, Tensor], read: Mapping[str, Tensor]
) -> None:
    """Compare the new heads [D_1, D_2, ...] of three critics by name; ``other`` has another ``model.seed``.

    Args:
        read: weights [D_1, D_2, ...] of the first one's folder, which are no head, also under another name.
    """
    for name, value in sorted(first.items()):
        if any(value.shape == old.shape and torch.equal(value, old.to(value.dtype)) for old in read.values()):
            continue
        assert torch.equal(same[name], first[name]), (
            f"The new '{name}' of two critics with the same model.seed differs: it must not depend on anything else."
        )
        if bool(first[name].any()):
            assert not torch.equal(other[name], first[name]), (
                f"The new '{name}' is the same for any model.seed."
            )


def _exported(bench: TrainBench, engine: TrainEngine, batch: Batch, role: str, output: str) -> Tensor:
    """Export an engine, build another one of the role from that folder, and return its output [T]."""
    folder = bench.folder / f"exported-{role}"
    engine.export(folder)
    bench.barrier()
    return bench.infer(bench.engine(role=role, path=str(folder), optim=MEASURE), batch, (output,))[output]


@contract(
    role="reward_model",
    catches=(
        "scores read at the token before",
        "scores of the last token only",
        "a new head instead of the folder's",
    ),
)
def scores_and_their_gradient_equal_the_reference(bench: TrainBench) -> None:
    """A reward model's ``scores[t]`` come from its head on the hidden state of token t, and so does their gradient.

    This holds at every loss token, also the first of a sequence. A trained model that is exported and built from its folder
    gives the same scores.
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
    close(
        _exported(bench, engine, batch, "reward_model", "scores"),
        bench.infer(engine, batch, ("scores",))["scores"],
        10 * bench.tolerance,
        "scores of a reward model built from its export",
    )


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
