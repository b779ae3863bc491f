"""Cases for several ranks: functions of a bench, run by ``Workers``; see ``test_zero.py``."""

import gc
import json
import math
import time
from pathlib import Path
from unittest import mock

import torch
from safetensors import safe_open
from torch.multiprocessing.reductions import StorageWeakRef

from engine_plugin_testing.contracts import close, identical, refused
from engine_plugin_testing.reference import gradient_of, nll_loss, norm_of
from engine_plugin_testing.train_bench import MEASURE
from engine_plugin_torch.build import ModelBuilder

OPTIM = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2, "weight_decay": 0.01}


def one_step(bench):
    """Loss, norm and gradient of one step are those of the float64 module, within the type's rounding."""
    batch, module = bench.batch(), bench.reference()
    expected, loss = gradient_of(module, nll_loss(module, batch)), nll_loss(module, batch)
    rounding = bench.gradient_tolerance
    engine = bench.engine(optim=MEASURE, budget=24)
    before = masters(engine)
    trained = bench.forward_backward(engine, batch)
    step = engine.optimizer_step()
    assert not step.skipped
    assert trained.num_micro_batches > 1
    assert abs(trained.loss / float(loss) - 1) < rounding, (trained.loss, float(loss))
    assert abs(step.grad_norm / norm_of(expected) - 1) < rounding, (step.grad_norm, norm_of(expected))
    square, size = 0.0, 0.0
    for name, after in masters(engine).items():
        change = before[name].double() - after.double()
        found = change / (1 - change.abs()).clamp(min=1e-6)
        square += float((found - expected[name]).square().sum())
        size += float(expected[name].square().sum())
    assert (square / size) ** 0.5 < rounding, (square / size) ** 0.5


def masters(engine):
    """Copies of the weights that a step changes, on the CPU."""
    return {n: t.detach().float().cpu().clone() for n, t in engine.partitions.exact_weights(1 << 20)}


def weights_are_spread(bench):
    """Between passes each rank holds its part of every weight and of the optimizer, and no whole one."""
    engine, batch = bench.engine(), bench.batch()
    bench.step(engine, batch)
    bench.infer(engine, batch)
    own = engine.partitions.own.values()
    assert all(p.numel() == 0 for p in own)
    every = sum(p.ds_numel for p in own)
    held = sum(p.ds_tensor.numel() for p in own)
    moments = sum(v.numel() for s in engine.optimizer.state.values() for v in s.values() if v.ndim)
    assert abs(held * engine.ranks.size / every - 1) < 0.05
    assert moments == 2 * held


def buckets_are_bounded(bench):
    """Weights are gathered a few at a time: with a bucket of 0 MiB nothing but one tensor is whole."""
    engine, most = bench.engine(), 0
    engine.options = engine.options.model_copy(update={"weights_bucket_mb": 0})
    for _ in engine.named_weights():
        most = max(most, sum(p.numel() for p in engine.partitions.own.values()))
    assert most == 0  # what is given away is a copy, and the weight itself in parts again
    gathers = []
    import deepspeed

    with mock.patch.object(deepspeed.zero, "GatheredParameters", _Counted(gathers)):
        names = [name for name, _ in engine.named_weights()]
    assert gathers == [1] * len(names)


class _Counted:
    def __init__(self, seen):
        import deepspeed

        self.seen, self.real = seen, deepspeed.zero.GatheredParameters

    def __call__(self, params, **arguments):
        self.seen.append(len(params))
        return self.real(params, **arguments)


def each_rank_reads_its_part(bench):
    """No rank reads the whole folder or holds the whole model, and weights are those of the folder."""
    for tied in (True, False):
        path = bench.model(tied=tied)
        with mock.patch.object(ModelBuilder, "load", side_effect=AssertionError("whole")):
            engine = bench.engine(path=path, optim=OPTIM)
        assert all(p.numel() == 0 for p in engine.partitions.own.values())
        expected = {name: value.float() for name, value in bench.reference(path).state_dict().items()}
        for name, value in bench.weights(engine).items():
            assert torch.equal(value, expected[name]), name
        decayed = [g["weight_decay"] for g in engine.optimizer.param_groups]
        assert decayed == [0.01, 0.0]
        assert all("norm" in name for name in engine._members[1])
        assert not any("norm" in name for name in engine._members[0])
    one_step(bench)


def save_for_another(bench):
    """Two steps, a checkpoint, two more: what the steps after it gave, for another engine to compare."""
    folder, batch = Path(bench.settings["shared"]), bench.batch()
    engine = bench.engine(optim=OPTIM)
    for _ in range(2):
        bench.step(engine, batch)
    engine.save(folder / "state").result()
    bench.barrier()
    told = [_told(bench, engine, batch) for _ in range(2)]
    if bench.place.rank == 0:
        (folder / "steps.json").write_text(json.dumps(told))


def go_on_from_another(bench):
    """The same loss, norm and rate in the next two steps, up to float32."""
    folder, batch = Path(bench.settings["shared"]), bench.batch()
    engine = bench.engine(optim=OPTIM, path=bench.model(seed=1))
    engine.load(folder / "state")
    for number, expected in enumerate(json.loads((folder / "steps.json").read_text())):
        found = _told(bench, engine, batch)
        for name, value in expected.items():
            assert abs(found[name] - value) <= 1e-4 * abs(value), (number, name, found[name], value)


def _told(bench, engine, batch):
    loss = bench.forward_backward(engine, batch).loss
    step = engine.optimizer_step()
    return {"loss": loss, "grad_norm": step.grad_norm, "lr": step.lr}


def every_rank_writes_some(bench):
    """A checkpoint holds each weight and moment once, whole, and about as much in each rank's file."""
    engine, folder = bench.engine(optim=OPTIM), bench.folder / "state"
    bench.step(engine, bench.batch())
    engine.save(folder).result()
    bench.barrier()
    sizes, names = [], []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            names += [f"{file.name.partition('-')[0]}:{name}" for name in opened.keys()]  # noqa: SIM118
        sizes.append(file.stat().st_size)
    bench.barrier()
    assert len(sizes) == 2 * engine.ranks.size
    assert len(names) == len(set(names)) == 4 * len(engine.partitions.own)  # and exp_avg, exp_avg_sq, step
    assert max(sizes[:2]) < 2 * min(sizes[:2])
    if bench.place.rank == 0:
        (folder / "optimizer-00001-of-00002.safetensors").rename(folder / "elsewhere")
    bench.barrier()
    before = bench.weights(engine)
    with refused("a checkpoint without a rank's file", "optimizer-00001-of-00002"):
        engine.load(folder)
    identical(bench.weights(engine), before, "weights after a refused load")


def fp16_scales_and_recovers(bench):
    """An overflow skips the step on all ranks and halves the scale, which a checkpoint keeps; then steps go on."""
    batch, module = bench.batch(), bench.reference()
    norm = norm_of(gradient_of(module, nll_loss(module, batch)))
    with refused("fp16 on a CPU that has none", "actor.deepspeed.compute_dtype", "'fp16'"), _fp16(False):
        bench.engine()
    # DeepSpeed asks for instructions that few CPUs have; torch computes it on all
    bench.stack.enter_context(_fp16(True))
    engine = bench.engine(optim={"lr": 0.0})
    bench.step(engine, batch)
    scaler = engine.store.loss_scaler
    scaler.cur_scale = 2.0**40
    before = bench.weights(engine)
    steps = [bench.step(engine, batch) for _ in range(40)]
    skipped = [step.skipped for step in steps]
    assert skipped[0]
    assert not skipped[-1]
    assert [step.rescaled for step in steps] == skipped
    assert scaler.cur_scale == 2.0 ** (40 - sum(skipped))
    assert abs(steps[-1].grad_norm / norm - 1) < 0.02
    identical(bench.weights(engine), before, "weights after steps of rate 0")
    engine.save(bench.folder / "state").result()
    bench.barrier()
    again = bench.engine(optim={"lr": 0.0})
    again.load(bench.folder / "state")
    assert again.store.loss_scaler.cur_scale == scaler.cur_scale
    scaler.cur_scale = 8.0
    assert _skipped(bench, engine, math.inf) == (True, False)  # no scale helps a loss that is not finite
    scaler.cur_scale = 1.0
    assert _skipped(bench, engine, 1e9) == (True, False)  # it overflows without a scale, too


def _skipped(bench, engine, factor):
    """Return whether a step with ``factor`` times the loss is skipped, and whether it lowers the scale."""
    batch = bench.batch()
    step = bench.step(engine, batch.with_columns({"weights": batch["weights"] * factor}))
    return step.skipped, step.rescaled


def _fp16(there):
    import deepspeed

    return mock.patch.object(type(deepspeed.get_accelerator()), "is_fp16_supported", return_value=there)


def values_are_learned(bench):
    """A critic learns as the reference engine does: the same loss and norm, in its first step."""
    from engine_core.config import ModelConfig, OptimConfig, RoleConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.types import LossCall
    from engine_plugin_torch.engine import TorchEngine
    from engine_plugin_torch.options import TorchOptions

    batch = bench.batch()
    batch = batch.with_columns({"returns": torch.linspace(-1, 1, batch.num_tokens)})
    engine = bench.engine(role="critic", optim=MEASURE)
    plain = TorchEngine(
        RoleConfig(backend=bench.name, options=TorchOptions(), optim=OptimConfig(**MEASURE)),
        ModelConfig(path=bench.model()),
        WorkerContext(plugins=engine.context.plugins, role="critic", device=bench.device),
    )
    bench.stack.callback(plain.close)
    expected = plain.infer(batch, ("values",))["values"]
    assert expected.abs().max() > 1e-3
    close(bench.infer(engine, batch, ("values",))["values"], expected, 1e-5, "values")
    batch = batch.with_columns({"values": expected})
    loss = LossCall("value", {}, outputs=("values",))
    ours, theirs = bench.forward_backward(engine, batch, loss), plain.forward_backward(batch, loss)
    assert abs(ours.loss / theirs.loss - 1) < 1e-5
    norms = engine.optimizer_step().grad_norm, plain.optimizer_step().grad_norm
    assert abs(norms[0] / norms[1] - 1) < 1e-5, norms


def another_optimizer_is_refused(bench):
    """A checkpoint whose weights have taken different numbers of steps cannot be told to one part of ZeRO."""
    engine = bench.engine(optim=OPTIM)
    bench.step(engine, bench.batch())
    names = list(engine.partitions.state_names())[:2]
    values = {f"{name}/step": torch.tensor(float(number)) for number, name in enumerate(names)}
    with refused("different numbers of steps", "'step'", names[1]):
        engine.partitions.set_state({name: ["step"] for name in names}, values.__getitem__)


def asleep_it_holds_no_memory(bench):
    """Asleep, neither weights nor state of the optimizer lie on the device; kept weights are given away; then it goes on."""
    engine, other, batch = bench.engine(), bench.engine(), bench.batch()
    for one in (engine, other):
        bench.step(one, batch)
    engine.sleep(keep=("weights",))
    identical(bench.weights(engine), bench.weights(other), "weights kept in sleep", bench.exact)
    assert held(engine, "optimizer") == held(engine, "gradients") == 0 < held(engine, "weights")
    engine.sleep()
    assert held(engine, "weights") == 0
    engine.wake(only=("weights",))
    identical(bench.weights(engine), bench.weights(other), "weights awake alone", bench.exact)
    assert held(engine, "optimizer") == 0
    engine.wake()
    for one in (engine, other):
        bench.step(one, batch)
    identical(bench.weights(engine), bench.weights(other), "weights a step after sleep", bench.exact)
    engine.save(bench.folder / "state").result()


def held(engine, part):
    """Bytes below the tensors of a part, as DeepSpeed and the optimizer name them."""
    zero = engine.zero.optimizer
    masters = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
    tensors = {
        "weights": [*(getattr(p, "ds_tensor", p) for p in engine.module.parameters()), *masters],
        "gradients": [b for b in [getattr(zero, "grad_partitions_flat_buffer", None)] if b is not None],
        "optimizer": [v for state in engine.optimizer.state.values() for v in state.values() if v.ndim],
    }
    return sum(t.untyped_storage().nbytes() for t in tensors[part])


def nothing_is_left_of_a_closed_engine(bench):
    """The memory of weights, gradients and optimizer state is given back."""
    engine = bench.engine()
    for _ in range(2):
        bench.step(engine, bench.batch())
    zero = engine.zero.optimizer
    masters = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
    flat = getattr(zero, "grad_partitions_flat_buffer", None)
    tensors = [
        *(getattr(p, "ds_tensor", p) for p in engine.module.parameters()),
        *masters,
        *([] if flat is None else [flat]),
        *(v for state in engine.optimizer.state.values() for v in state.values() if v.ndim),
    ]
    memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    assert len(memory) > 3
    del tensors, masters, flat, zero
    engine.close()
    gc.collect()
    # a thread of gloo lets go of its last collective's tensors a moment after it has told that this is done
    deadline = time.monotonic() + 10
    while not all(storage.expired() for storage in memory):
        assert time.monotonic() < deadline, "an engine that was closed holds weights, gradients or state"
        time.sleep(0.01)
