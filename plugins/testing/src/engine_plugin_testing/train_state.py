"""Contracts of ``save`` and ``load``: a run that was stopped continues as if it had not been."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from engine_core.errors import EngineError
from engine_plugin_testing.contracts import contract, identical, near

if TYPE_CHECKING:
    from engine_core.contracts.engines import TrainEngine
    from engine_plugin_testing.train_bench import TrainBench

OPTIM = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2, "weight_decay": 0.01}


@contract(catches=("optimizer state not saved", "schedule not saved"))
def a_resumed_run_continues_exactly(bench: TrainBench) -> None:
    """``save``, ``load`` into a fresh engine, two more steps: loss, learning rate and weights of a run that never stopped."""
    batch = bench.batch()
    straight = bench.engine(optim=OPTIM)
    for _ in range(2):
        bench.step(straight, batch)
    straight.save(bench.folder / "state").result()
    bench.barrier()
    resumed = bench.engine(optim=OPTIM, path=bench.model(seed=1))
    resumed.load(bench.folder / "state")
    identical(bench.weights(resumed), bench.weights(straight), "weights after load")
    for number in (3, 4):
        steps = []
        for engine in (straight, resumed):
            loss = bench.forward_backward(engine, batch).loss
            steps.append((loss, engine.optimizer_step().lr))
        assert steps[0][1] == steps[1][1], (
            f"Step {number} of the resumed run used the learning rate {steps[1][1]}; expected {steps[0][1]}."
        )
        if bench.exact:
            assert steps[0][0] == steps[1][0], (
                f"Step {number}: loss {steps[1][0]!r}, expected {steps[0][0]!r}."
            )
        identical(
            bench.weights(resumed), bench.weights(straight), f"weights after step {number}", bench.exact
        )


def _goes_on(bench: TrainBench) -> None:
    """Run the second half of ``a_run_goes_on_on_another_number_of_ranks``."""
    engine = bench.engine(optim=OPTIM, path=bench.model(seed=1))
    try:
        engine.load(bench.shared / "state")
    except EngineError as error:
        raise AssertionError(
            f"What other ranks saved does not load on {bench.place.world_size}: {error}"
        ) from error
    identical(bench.weights(engine), load_file(bench.shared / "weights.safetensors"), "weights after load")
    for number, expected in enumerate(json.loads((bench.shared / "steps.json").read_text("utf-8"))):
        for name, value in _step_of(bench, engine).items():
            near(value, expected[name], 1e-4, f"{name}, {number + 1} steps after load")


def _step_of(bench: TrainBench, engine: TrainEngine) -> dict[str, float]:
    loss = bench.forward_backward(engine, bench.batch()).loss
    step = engine.optimizer_step()
    return {"loss": loss, "grad_norm": step.grad_norm, "lr": step.lr}


@contract(follow=_goes_on, catches=("a checkpoint that only as many ranks can load",))
def a_run_goes_on_on_another_number_of_ranks(bench: TrainBench) -> None:
    """``save`` on ``world_size`` ranks, ``load`` on those of ``resumes_on``: the same weights, and the same loss, norm and rate of two more steps."""
    engine = bench.engine(optim=OPTIM)
    for _ in range(2):
        bench.step(engine, bench.batch())
    engine.save(bench.shared / "state").result()
    weights = bench.weights(engine)
    steps = [_step_of(bench, engine) for _ in range(2)]
    if bench.place.rank == 0:
        save_file(weights, bench.shared / "weights.safetensors")
        (bench.shared / "steps.json").write_text(json.dumps(steps), encoding="utf-8")
    bench.barrier()


@contract(catches=("random state not saved",))
def the_random_state_comes_back(bench: TrainBench) -> None:
    """After ``load``, torch's generator gives what it would have given after ``save``, on every rank."""
    engine = bench.engine()
    torch.manual_seed(77 + bench.place.rank)
    engine.save(bench.folder / "state").result()
    expected = torch.rand(8)
    bench.barrier()
    torch.manual_seed(0)
    engine.load(bench.folder / "state")
    found = torch.rand(8)
    assert torch.equal(found, expected), (
        f"Random numbers after load: {found[:3].tolist()}, expected {expected[:3].tolist()}."
    )


@contract(catches=("saving clears the optimizer state",))
def saving_changes_nothing(bench: TrainBench) -> None:
    """A run that saves takes the same steps as one that does not; its files stay as they were saved."""
    batch = bench.batch()
    plain, saving = bench.engine(optim=OPTIM), bench.engine(optim=OPTIM)
    for engine in (plain, saving):
        bench.step(engine, batch)
    weights = bench.weights(saving)
    saved = saving.save(bench.folder / "state")
    saved.result()
    bench.barrier()
    for engine in (plain, saving):
        bench.step(engine, batch)
    identical(bench.weights(saving), bench.weights(plain), "weights of the run that saved", bench.exact)
    saving.load(bench.folder / "state")
    identical(bench.weights(saving), weights, "weights after going back to what was saved")


@contract(catches=("a pickle among the files",))
def state_holds_no_pickle(bench: TrainBench) -> None:
    """No file that ``save`` writes is a pickle, or a zip of one."""
    engine = bench.engine()
    bench.step(engine, bench.batch())
    engine.save(bench.folder / "state").result()
    bench.barrier()
    files = [file for file in (bench.folder / "state").rglob("*") if file.is_file()]
    assert files, "save wrote no file."
    bad = [
        file.name for file in files if file.read_bytes()[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04")
    ]
    assert not bad, f"Files that hold a pickle: {bad[:5]}. Write tensors in safetensors and scalars in JSON."


@contract(catches=("another model's state loaded",))
def the_state_of_another_model_is_refused(bench: TrainBench) -> None:
    """``load`` of another model's files, or of an empty folder, raises an error for the user and leaves no half-loaded engine."""
    other = bench.engine(path=bench.model(num_hidden_layers=8))  # a number that stages of a pipeline divide
    other.save(bench.folder / "other").result()
    bench.barrier()
    (bench.folder / "empty").mkdir(exist_ok=True)
    for what in ("other", "empty"):
        engine = bench.engine()
        try:
            engine.load(bench.folder / what)
        except EngineError:
            continue
        except Exception as error:
            raise AssertionError(
                f"load of {what} files raises {type(error).__name__} ({error}); expected a DataError that says what to do."
            ) from error
        raise AssertionError(f"load of {what} files is not refused.")
