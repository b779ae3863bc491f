"""Contracts of ``named_weights``, ``load_named_weights`` and ``export``."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from engine_plugin_testing.contracts import close, contract, identical, near, refused, same_direction
from engine_plugin_testing.reference import gradient_of, nll_loss, norm_of, outputs_of, published
from engine_plugin_testing.train_adapters import LORA, adapted, adapter_of, takes_adapters
from engine_plugin_testing.train_bench import MEASURE, rounding

if TYPE_CHECKING:
    from engine_plugin_testing.train_bench import TrainBench


@contract(catches=("a weight left out of named_weights", "a saved buffer left out of named_weights"))
def named_weights_are_those_of_the_model_folder(bench: TrainBench) -> None:
    """Before any step, ``named_weights`` gives every tensor of the model folder with its name and value.

    Shapes are whole. Saved buffers are weights, too.
    """
    for tied in (True, False):
        path = bench.model(tied=tied)
        found, expected = bench.weights(bench.engine(path=path)), published(path)
        missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        assert not missing, f"named_weights lacks {len(missing)} weights: {missing[:5]}."
        assert not unknown, f"named_weights gives weights that save_pretrained does not write: {unknown[:5]}."
        for name, value in expected.items():
            close(found[name].float(), value.float(), rounding(found[name]), f"weight '{name}'")


@contract(
    catches=("random weights that model.seed does not decide", "random weights that reset torch's generator")
)
def random_weights_are_those_of_the_seed(bench: TrainBench) -> None:
    """A folder with a config and no weights gives random weights of `model.seed`, the same in each role and in each start.

    Torch's random state does not change. Empty for models of the suite's own.
    """
    if bench.settings["write_model"]:
        return
    folder = bench.folder / "no-weights"
    if bench.place.rank == 0:
        ignored = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(bench.model(), folder, ignore=ignored)
    else:
        bench.model()
    bench.barrier()
    state = torch.get_rng_state()
    first = bench.weights(bench.engine(path=str(folder), seed=3))
    assert torch.equal(torch.get_rng_state(), state), "Drawing a model's weights changes the random state."
    torch.rand(5)
    again = bench.engine(path=str(folder), seed=3, trainable=False, role="ref")
    identical(bench.weights(again), first, "random weights of a reference with the same model.seed")
    other = bench.weights(bench.engine(path=str(folder), seed=4))
    same = [name for name, value in first.items() if value.ndim > 1 and torch.equal(other[name], value)]
    assert not same, f"Weights are the same for two values of model.seed: {same[:3]}."
    batch = bench.batch((9, 12))
    with torch.no_grad():
        expected = outputs_of(bench.reference(weights=first), batch)["log_probs"]
    close(bench.infer(again, batch)["log_probs"], expected, bench.tolerance, "log_probs of random weights")


@contract(catches=("a tied weight given twice",))
def a_tied_weight_comes_once(bench: TrainBench) -> None:
    """``named_weights`` gives a tied weight once, under one name."""
    names = [name for name, _ in bench.engine(path=bench.model(tied=True)).named_weights()]
    assert len(names) == len(set(names)), "named_weights gives a name twice."
    expected = len(published(bench.model(tied=True)))
    assert len(names) == expected, (
        f"named_weights gives {len(names)} weights of a tied model; expected {expected}, the tied one once. "
        f"The last: {names[-3:]}."
    )


@contract(catches=("named_weights always from the first version",))
def named_weights_follow_a_step(bench: TrainBench) -> None:
    """After a step, ``named_weights`` gives the new weights.

    They are finite, and the reference with them has the engine's log-probs.
    """
    engine, batch = bench.engine(), bench.batch()
    before = bench.weights(engine)
    bench.step(engine, batch)
    after = bench.weights(engine)
    assert any(not torch.equal(after[name], before[name]) for name in after), (
        "named_weights does not follow a step."
    )
    wrong = [name for name, value in after.items() if not bool(value.isfinite().all())]
    assert not wrong, f"Weights that are not finite: {wrong[:5]}."
    with torch.no_grad():
        expected = outputs_of(bench.reference(weights=after), batch)["log_probs"]
    close(bench.infer(engine, batch)["log_probs"], expected, 10 * bench.tolerance, "log_probs after a step")


@contract()
def a_stream_of_weights_goes_to_its_end_for_the_leader(bench: TrainBench) -> None:
    """With ``named_weights(to="leader")``, the leader gets every weight.

    The call is collective: every rank reads the stream to its end.
    """
    engine = bench.engine()
    whole = bench.weights(engine)
    found = {name: value.detach().cpu().clone() for name, value in engine.named_weights(to="leader")}
    if engine.layout.is_leader and engine.layout.dp_rank == 0:
        identical(found, whole, "weights for the leader")


@contract(catches=("export always of the first version", "another type in the exported config.json"))
def export_is_loaded_by_from_pretrained(bench: TrainBench) -> None:
    """Transformers can load the folder that ``export`` writes, and gets the engine's weights and log-probs."""
    from transformers import AutoModelForCausalLM

    engine, batch = bench.engine(), bench.batch((9, 12))
    bench.step(engine, batch)
    weights, log_probs = bench.weights(engine), bench.infer(engine, batch)["log_probs"]
    engine.export(bench.folder / "export")
    bench.barrier()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        bench.folder / "export", dtype="auto", output_loading_info=True
    )
    model, info = loaded
    types = {value.dtype for value in weights.values()}
    assert model.dtype in types, f"The exported config.json says {model.dtype}; the weights are {types}."
    assert not info["missing_keys"], f"The exported folder lacks {sorted(info['missing_keys'])[:5]}."
    assert not info["unexpected_keys"], (
        f"The exported folder has unknown {sorted(info['unexpected_keys'])[:5]}."
    )
    identical(published(bench.folder / "export"), weights, "exported weights")
    with torch.no_grad():
        expected = outputs_of(model.eval(), batch)["log_probs"]
    close(log_probs, expected, 10 * bench.tolerance, "log_probs of the exported model")


@contract(catches=("the model folder's config exported instead of the run's",))
def an_override_of_the_model_is_used_and_exported(bench: TrainBench) -> None:
    """With a ``[model] override``, the engine computes with the changed config and also exports it.

    The override is ``rms_norm_eps``; the contract is empty for models without it.
    """
    path = bench.model()
    override: dict[str, Any] = {"rms_norm_eps": 0.5}
    config = Path(path) / "config.json"
    if bench.settings["write_model"] or "rms_norm_eps" not in json.loads(config.read_text("utf-8")):
        return
    engine, batch = bench.engine(path=path, override=override), bench.batch((9, 12))
    with torch.no_grad():
        expected = outputs_of(bench.reference(bench.model(**override)), batch)["log_probs"]
    close(bench.infer(engine, batch)["log_probs"], expected, bench.tolerance, "log_probs with an override")
    engine.export(bench.folder / "export")
    bench.barrier()
    found = json.loads((bench.folder / "export" / "config.json").read_text("utf-8"))
    assert found.get("rms_norm_eps") == 0.5, (
        f"The exported config.json has rms_norm_eps {found.get('rms_norm_eps')}; [model] override says 0.5."
    )
    with torch.no_grad():
        expected = outputs_of(bench.reference(str(bench.folder / "export")), batch)["log_probs"]
    close(bench.infer(engine, batch)["log_probs"], expected, 10 * bench.tolerance, "log_probs of the export")


@contract()
def weights_go_from_one_engine_to_another(bench: TrainBench) -> None:
    """An engine that loads another engine's stream by ``load_named_weights`` has the same weights and log-probs.

    The stream may come in any order.
    """
    source, target = bench.engine(), bench.engine(path=bench.model(seed=1))
    batch = bench.batch()
    bench.step(source, batch)
    weights = bench.weights(source)
    target.load_named_weights((name, weights[name]) for name in sorted(weights, reverse=True))
    identical(bench.weights(target), weights, "weights that were loaded")
    close(
        bench.infer(target, batch)["log_probs"],
        bench.infer(source, batch)["log_probs"],
        bench.tolerance,
        "log_probs",
    )


@contract(catches=("a step from the old weights", "received weights kept by reference"))
def a_step_starts_from_weights_that_were_loaded(bench: TrainBench) -> None:
    """The step after ``load_named_weights`` starts from the loaded weights.

    Its gradient is compared with a float64 one. The tensors of the stream are copied.
    """
    target, batch = bench.engine(path=bench.model(seed=1), optim=MEASURE), bench.batch()
    weights = published(bench.model())
    stream = {name: value.clone() for name, value in weights.items()}
    target.load_named_weights(stream.items())
    for value in stream.values():
        value.fill_(float("nan"))
    before = bench.weights(target)
    for name, value in weights.items():
        close(before[name], value, rounding(before[name]), f"weight '{name}' that was loaded")
    module = bench.reference(weights=weights)
    expected = gradient_of(module, nll_loss(module, batch))
    step = bench.step(target, batch)
    near(step.grad_norm, norm_of(expected), bench.gradient_tolerance, "grad_norm after new weights")
    found = bench.gradient(target, before)
    if min(value.dtype.itemsize for value in before.values()) >= 4:  # else too coarse to show a gradient
        same_direction(found, expected, bench.gradient_tolerance, "gradient after new weights")


@contract(
    catches=(
        "mix ignored",
        "vectors replaced where matrices are mixed",
        "an adapter forgotten where a whole model is mixed in",
    )
)
def weights_are_mixed_in_their_share(bench: TrainBench) -> None:
    """With ``mix=0.25``, each weight w becomes ``0.75 w + 0.25 new``.

    A reference model follows the actor slowly this way. If the engine trains adapters (``lora``), w of a whole model is
    ``W + scale B A``.
    """
    engine, other = bench.engine(trainable=False, role="ref"), published(bench.model(seed=1))
    other = {name: 1.5 * value if value.ndim < 2 else value for name, value in other.items()}
    before = bench.weights(engine)
    engine.load_named_weights(iter(other.items()), mix=0.25)
    for name, value in bench.weights(engine).items():
        mixed = 0.75 * before[name].double() + 0.25 * other[name]
        close(value, mixed, 2 * rounding(value), f"mixed weight '{name}'")
    if "lora" in bench.capabilities and importlib.util.find_spec("peft") and takes_adapters(bench):
        _compare_mixed_adapter(bench, other)


def _compare_mixed_adapter(bench: TrainBench, other: dict[str, torch.Tensor]) -> None:
    """Mix a whole model into a model with a trained adapter, and compare weights and log-probs."""
    engine, batch = bench.engine(lora=LORA, optim={**MEASURE, "weight_decay": 0.0}), bench.batch()
    bench.step(engine, batch)
    lora = engine.config.lora or LORA
    before = adapted(published(bench.model()), adapter_of(engine), lora.alpha / lora.rank)
    engine.load_named_weights(iter(other.items()), mix=0.25)
    found = bench.weights(engine)
    mixed = {name: 0.75 * value + 0.25 * other[name].double() for name, value in before.items()}
    for name, value in found.items():
        allowed = max(1e-5, 2 * rounding(value))
        close(value, mixed[name], allowed, f"weight '{name}' mixed into base and adapter")
    with torch.no_grad():
        expected = outputs_of(bench.reference(weights=mixed), batch)["log_probs"]
    close(bench.infer(engine, batch)["log_probs"], expected, 10 * bench.tolerance, "log_probs after a mix")


@contract(
    catches=(
        "a missing weight accepted",
        "a missing weight accepted where weights are mixed",
        "random values for a weight that the model folder lacks",
    ),
)
def weights_that_do_not_fit_are_refused(bench: TrainBench) -> None:
    """If a stream has an unknown name, lacks a weight or has a wrong shape, the engine raises an error that names the weight.

    This holds for weights that replace the engine's, and for those that are mixed in. On one rank, a model folder that lacks
    a weight is refused in the same way.
    """
    weights = published(bench.model())
    first, last = min(weights), max(weights)
    engine = bench.engine()
    for mix in (1.0, 0.25):
        with refused(f"a stream with an unknown weight (mix={mix})", "no.such.weight"):
            engine.load_named_weights([*weights.items(), ("no.such.weight", torch.zeros(2))], mix=mix)
        with refused(f"a stream without a weight (mix={mix})", last):
            engine.load_named_weights([(n, value) for n, value in weights.items() if n != last], mix=mix)
        with refused(f"a weight of another shape (mix={mix})", first):
            engine.load_named_weights(
                [(n, v[None] if n == first else v) for n, v in weights.items()], mix=mix
            )
    if bench.place.world_size == 1:
        folder = Path(shutil.copytree(bench.model(), bench.folder / "lacks-a-weight"))
        for file in folder.glob("*.safetensors"):
            kept = {name: value for name, value in load_file(file).items() if name != last}
            save_file(kept, file, metadata={"format": "pt"})
        with refused("a model folder without a weight", last):
            bench.engine(path=str(folder))
