"""Contracts of ``save`` and ``load``: a run that was stopped continues as if it had not been."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickletools
import shutil
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from engine_core.config import OptimConfig
from engine_core.contracts.engines import TrainEngine
from engine_core.errors import EngineError
from engine_core.types import LossCall
from engine_plugin_testing.contracts import close, contract, identical, near
from engine_plugin_testing.probes import SHORT, SHORTAGES, Stopped
from engine_plugin_testing.reference import published
from engine_plugin_testing.train_bench import rounding

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine_plugin_testing.train_bench import TrainBench

OPTIM = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2, "weight_decay": 0.01}
DECAY = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 0, "decay_steps": 20}  # no warm-up


@contract(
    catches=(
        "optimizer state not saved",
        "schedule not saved",
        "a schedule without warm-up not restored",
        "the peak rate of the saved run kept",
        "the weight decay of the saved run kept",
    )
)
def a_resumed_run_continues_exactly(bench: TrainBench) -> None:
    """A fresh engine that loads what ``save`` wrote takes the same two steps as a run that never stopped.

    Loss, learning rate and weights are compared, of a schedule with warm-up and of one without. Another peak rate or
    weight decay in the run file applies to the steps after ``load``.
    """
    for name, optim in (("warm-up", OPTIM), ("decay", DECAY)):
        _compare_resumed(bench, optim, bench.folder / name)
        _compare_changed(bench, optim, bench.folder / name)


def _compare_changed(bench: TrainBench, optim: Mapping[str, Any], folder: Path) -> None:
    """Compare runs that resume with another peak rate, and with another weight decay."""
    batch, path = bench.batch(), bench.model(seed=1)
    engines = []
    for changes in ({}, {"lr": 0.3 * optim["lr"]}, {"weight_decay": 0.9}):
        engines.append(bench.engine(optim={**optim, **changes}, path=path))
        engines[-1].load(folder)
    same, _, smaller = engines
    before = bench.weights(smaller)
    steps = [bench.step(engine, batch) for engine in engines]
    near(steps[1].lr, 0.3 * steps[0].lr, 1e-5, "lr of a run that resumes with 0.3 of its peak rate")
    if bench.settings["optimizer"] != "adamw":
        return
    more = 0.9 - optim.get("weight_decay", OptimConfig().weight_decay)
    plain, decayed = bench.weights(same), bench.weights(smaller)
    for name, value in plain.items():
        expected = value.double() - steps[0].lr * more * before[name].double() * (value.ndim > 1)
        allowed = 1e-6 + 4 * rounding(value)
        close(decayed[name], expected, allowed, f"'{name}' of a run that resumes with a weight decay of 0.9")


def _compare_resumed(bench: TrainBench, optim: Mapping[str, Any], folder: Path) -> None:
    batch = bench.batch()
    straight = bench.engine(optim=optim)
    for _ in range(2):
        bench.step(straight, batch)
    straight.save(folder).result()
    bench.barrier()
    resumed = bench.engine(optim=optim, path=bench.model(seed=1))
    resumed.load(folder)
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


@contract(
    catches=(
        "moments that survive a load",
        "a step count that survives a load",
        "a second save with the first weights",
        "a state that is read after the next step",
        "a second export with the first weights",
    )
)
def a_state_replaces_all_of_an_engine_that_trained(bench: TrainBench) -> None:
    """In an engine that has already trained, ``load`` replaces all state.

    The engine then continues as the saved run did. A second ``save`` and ``export`` hold the state of their time, as
    the first do of theirs.
    """
    batch, optim = bench.batch(), {**OPTIM, "max_grad_norm": 0.05}
    straight = bench.engine(optim=optim)
    states, saved = [], []
    for number in range(4):
        bench.step(straight, batch)
        states.append(bench.weights(straight))
        if number in (0, 2):
            saved.append(straight.save(bench.folder / f"state-{number}"))
            straight.export(bench.folder / f"export-{number}")
        elif number == 3:  # a step later
            for done in saved:
                done.result()
    bench.barrier()
    used, other = bench.engine(optim=optim, path=bench.model(seed=1)), bench.batch((9, 31, 4), seed=7)
    for number in (2, 0):
        for _ in range(3):
            bench.step(used, other)
        used.load(bench.folder / f"state-{number}")
        identical(bench.weights(used), states[number], f"weights of the state after step {number + 1}")
        identical(
            published(bench.folder / f"export-{number}"), states[number], f"export after step {number + 1}"
        )
        bench.step(used, batch)
        what = f"weights one step after loading the state of step {number + 1}"
        identical(bench.weights(used), states[number + 1], what, bench.exact)


@contract(
    catches=(
        "weights in half precision left by a call that was stopped",
        "a schedule that moves when a call begins",
    )
)
def a_call_that_is_stopped_leaves_the_last_step(bench: TrainBench) -> None:
    """A stop, which raises, may end ``forward_backward`` at any point. What ``save`` then writes is the state of the last step.

    A fresh engine that loads it continues as a run that never stopped. With several ranks the others would wait.
    """
    if bench.place.world_size > 1:
        return
    batch, folder = bench.batch(), bench.folder / "stopped"
    spared, hit = (bench.engine(optim=OPTIM, budget=24) for _ in range(2))
    for engine in (spared, hit):
        bench.step(engine, batch)
    before = bench.weights(hit)
    hit.mark()
    random = torch.get_rng_state()
    SHORTAGES[:] = [None, Stopped]  # the second micro-batch
    try:
        bench.forward_backward(hit, batch, LossCall(SHORT))
    except Stopped:
        pass
    else:
        raise AssertionError("A stop within forward_backward does not reach the caller.")
    finally:
        SHORTAGES.clear()
    identical(bench.weights(hit), before, "weights after a call that was stopped")
    assert torch.equal(torch.get_rng_state(), random), "A call that is stopped changes the random state."
    hit.save(folder).result()
    resumed = bench.engine(optim=OPTIM, budget=24)
    resumed.load(folder)
    for number in (2, 3):
        steps = [bench.step(engine, batch) for engine in (spared, resumed)]
        assert steps[0].lr == steps[1].lr, f"lr of step {number}: {steps[1].lr}, expected {steps[0].lr}."
        what = f"weights after step {number} of a run that was stopped"
        identical(bench.weights(resumed), bench.weights(spared), what, bench.exact)


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
    """A checkpoint of ``world_size`` ranks can be continued on each number of ranks in ``resumes_on``.

    The weights are the same, and so are loss, norm and rate of two more steps.
    """
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


@contract(
    catches=(
        "random state not saved",
        "the random state at the last mark not saved",
        "a mark that survives a load",
        "a second mark that does not replace the first",
    )
)
def the_random_state_comes_back(bench: TrainBench) -> None:
    """``load`` restores torch's random state on every rank as it was at ``save``.

    If the engine has a ``mark``, the state is that of the last ``mark``, even if random numbers were drawn after it. ``load`` ends
    the time of a ``mark``.
    """
    engine = bench.engine()
    torch.manual_seed(77 + bench.place.rank)
    _compare_random(bench, engine, "save")
    if type(engine).mark is not TrainEngine.mark:
        engine.mark()
        torch.manual_seed(99 + bench.place.rank)
        engine.mark()
        _compare_random(bench, engine, "mark")
        _compare_random(bench, engine, "a save after load")


def _compare_random(bench: TrainBench, engine: TrainEngine, since: str) -> None:
    """Compare the draws after ``load`` with those that follow now; at a ``mark`` they are drawn before ``save``."""
    folder = bench.folder / f"random-{since}"
    if since == "mark":
        expected = torch.rand(8)
        engine.save(folder).result()
    else:
        engine.save(folder).result()
        expected = torch.rand(8)
    bench.barrier()
    torch.manual_seed(0)
    engine.load(folder)
    found = torch.rand(8)
    assert torch.equal(found, expected), (
        f"Random numbers after load: {found[:3].tolist()}, expected {expected[:3].tolist()}, those after {since}."
    )


@contract(catches=("saving clears the optimizer state", "saving clears the gradients"))
def saving_changes_nothing(bench: TrainBench) -> None:
    """A run that saves, exports and streams its weights takes the same steps as a run that does none of this.

    It does so between two calls of a step. Its files stay as they were saved.
    """
    batch = bench.batch()
    plain, saving = bench.engine(optim=OPTIM), bench.engine(optim=OPTIM)
    for engine in (plain, saving):
        bench.step(engine, batch)
        bench.forward_backward(engine, batch.select(range(4)))
    weights = bench.weights(saving)
    saved = saving.save(bench.folder / "state")
    saved.result()
    saving.export(bench.folder / "export")
    bench.barrier()
    for engine in (plain, saving):
        bench.forward_backward(engine, batch.select(range(4, 8)))
        engine.optimizer_step()
    identical(bench.weights(saving), bench.weights(plain), "weights of the run that saved", bench.exact)
    saving.load(bench.folder / "state")
    identical(bench.weights(saving), weights, "weights after going back to what was saved")


@contract(
    catches=(
        "a failed save that counts as done",
        "a file that cannot be written left out",
        "a save into a place that cannot exist that never ends",
    )
)
def a_save_that_cannot_be_written_raises(bench: TrainBench) -> None:
    """If a file cannot be written, ``save`` or its future raises an ``OSError`` on a rank, and no rank waits forever.

    The engine stays as it is, and the next save can be loaded.
    """
    engine, blocked = bench.engine(), bench.folder / "file"
    bench.step(engine, bench.batch())
    weights = bench.weights(engine)
    if bench.place.rank == 0:
        blocked.write_text("no folder")
    bench.barrier()
    assert _fails(bench, engine, blocked / "state"), (
        "A save into a folder that cannot exist raises no OSError."
    )
    identical(bench.weights(engine), weights, "weights after a save that failed")
    good = bench.folder / "state"
    engine.save(good).result()
    bench.barrier()
    other = bench.engine()
    other.load(good)
    identical(bench.weights(other), weights, "weights of the save after one that failed")
    names = sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file())
    bench.barrier()
    for number, name in enumerate(names):
        folder = bench.folder / f"blocked-{number}"
        (folder / name / "occupied").mkdir(parents=True, exist_ok=True)  # no file of this name can be written
        bench.barrier()
        if not _fails(bench, engine, folder):
            assert (folder / name).is_file(), (
                f"The file {name} could not be written, and save raises no OSError."
            )


def _fails(bench: TrainBench, engine: TrainEngine, folder: Path) -> bool:
    """Save into a folder, and return whether an ``OSError`` was raised on a rank."""
    failed = torch.zeros(())
    try:
        engine.save(folder).result(timeout=30)
    except TimeoutError as error:
        raise AssertionError("The future of a save that cannot be written is never done.") from error
    except OSError:
        failed += 1
    bench.sum_over_ranks(failed)
    return bool(failed)


def _is_safetensors(data: bytes) -> bool:
    """Return whether data begins with the header of a safetensors file: its length, and a JSON object."""
    try:
        return isinstance(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]), dict)
    except (ValueError, OverflowError):
        return False


def _holds_pickle(data: bytes) -> bool:
    """Return whether data is a pickle of any protocol, alone or compressed or at its beginning, or an archive that holds one."""
    for magic, unpack in (
        (b"\x1f\x8b", gzip.decompress),
        (b"BZh", bz2.decompress),
        (b"\xfd7zXZ", lzma.decompress),
    ):
        if data.startswith(magic):
            return _holds_pickle(unpack(data))
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return any(_holds_pickle(archive.read(name)) for name in archive.namelist())
    if tarfile.is_tarfile(io.BytesIO(data)):
        with tarfile.open(fileobj=io.BytesIO(data)) as members:
            found = [members.extractfile(member) for member in members if member.isfile()]
            return any(_holds_pickle(file.read()) for file in found if file is not None)
    if _is_safetensors(data):  # its first byte may be an opcode
        return False
    seen = 0
    try:
        for seen, _ in enumerate(pickletools.genops(data)):  # noqa: B007  ends at the opcode STOP
            pass
    except Exception:  # not every error of malformed data is a ValueError
        return False
    return seen > 0  # a text that begins with a full stop is STOP alone


@contract(
    catches=(
        "a pickle among the files",
        "a pickle of protocol 0",
        "a pickle of protocol 5",
        "a pickle in a zip",
    )
)
def state_holds_no_pickle(bench: TrainBench) -> None:
    """No file that ``save`` writes is a pickle, or an archive that contains one.

    Every protocol of pickle is refused.
    """
    engine = bench.engine()
    bench.step(engine, bench.batch())
    engine.save(bench.folder / "state").result()
    bench.barrier()
    files = [file for file in (bench.folder / "state").rglob("*") if file.is_file()]
    assert files, "save wrote no file."
    bad = [str(file.relative_to(bench.folder)) for file in files if _holds_pickle(file.read_bytes())]
    assert not bad, f"Files that hold a pickle: {bad[:5]}. Write tensors in safetensors and scalars in JSON."


@contract(
    catches=(
        "another model's state loaded",
        "a state without an optimizer taken by a role that is trained",
        "a missing file of a state passed over",
        "a file of a state that is cut off passed over",
    )
)
def the_state_of_another_model_is_refused(bench: TrainBench) -> None:
    """If ``load`` gets the files of another model, of a role that is not trained, or an empty folder, it raises an error for the user.

    On one rank the same holds for a state that lacks a file, or has half of one, unless the run continues without it as it would have.
    """
    other = bench.engine(path=bench.model(num_hidden_layers=8))  # a number that stages of a pipeline divide
    for what, saving in {"other": other, "frozen": bench.engine(trainable=False, role="ref")}.items():
        saving.save(bench.folder / what).result()
    bench.barrier()
    (bench.folder / "empty").mkdir(exist_ok=True)
    for what in ("other", "frozen", "empty"):
        assert not _loads(bench.engine(), bench.folder / what), f"load of {what} files is not refused."
    if bench.place.world_size == 1:
        _check_damaged(bench)


def _loads(engine: TrainEngine, folder: Path) -> bool:
    """Load a state, and return whether it is not refused."""
    try:
        engine.load(folder)
    except EngineError:
        return False
    except Exception as error:
        raise AssertionError(
            f"load of '{folder.name}' raises {type(error).__name__} ({error}); expected a DataError that says what to do."
        ) from error
    return True


def _check_damaged(bench: TrainBench) -> None:
    """Check that a state without one of its files, or with half of one, is refused, or is as the whole one."""
    straight, batch, whole = bench.engine(optim=OPTIM), bench.batch(), bench.folder / "whole"
    bench.step(straight, batch)
    straight.save(whole).result()
    random = torch.get_rng_state()
    bench.step(straight, batch)
    expected, engine = bench.weights(straight), bench.engine(optim=OPTIM)
    for name in sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file()):
        for share in (0.0, 0.5):
            folder = bench.folder / f"{'half' if share else 'no'}-{str(name).replace('/', '-')}"
            shutil.copytree(whole, folder)
            data = (folder / name).read_bytes()
            (folder / name).unlink()
            if share:
                (folder / name).write_bytes(data[: len(data) // 2])
            torch.manual_seed(0)
            if _loads(engine, folder):
                what = f"of a state with {folder.name}"
                assert torch.equal(torch.get_rng_state(), random), f"The random state {what} is another."
                bench.step(engine, batch)
                identical(bench.weights(engine), expected, f"weights one step after load {what}", bench.exact)
