"""Cases of what is kept out of sharding, read by parts and computed in other types; see ``test_parts.py``."""

import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from engine_plugin_fsdp import engine as module
from engine_plugin_fsdp import fp8
from engine_plugin_fsdp.checkpoint import gathered
from engine_plugin_testing.contracts import identical, refused
from engine_plugin_testing.reference import gradient_of, nll_loss, norm_of
from engine_plugin_testing.train_bench import MEASURE

# of a norm: 2^-4 of rounding a product in e4m3, 2^-3 of a gradient in e5m2, several in a chain
EIGHT_BITS = 0.25
NAMED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parts_are_read(bench):
    """The weights of the broadcasting load, bit for bit; of each weight a rank reads its own rows."""
    read, found = [], {}
    original = module.read_slices

    def counted(*arguments):
        found = original(*arguments)
        read.append(found.bytes)
        return found

    module.read_slices = counted
    try:
        for path in (bench.model(tied=True), bench.model(tied=False)):
            for loading in ("broadcast", "sharded"):
                bench.settings["options"] = {"loading": loading}
                found[loading] = bench.weights(bench.engine(path=path))
            identical(found["sharded"], found["broadcast"], "weights read by parts")
            (file,) = Path(path).glob("*.safetensors")
            with safe_open(str(file), "pt") as opened:
                every = sum(opened.get_tensor(n).nbytes for n in opened.keys())  # noqa: SIM118
            share = torch.tensor([float(read[-1])])
            bench.sum_over_ranks(share)
            assert float(share) == every, (float(share), every)  # each byte once, on one rank
            assert abs(read[-1] * bench.place.world_size / every - 1) < 0.05, (read[-1], every)
    finally:
        module.read_slices = original


def tensors_come_whole(bench):
    """Of any rows, type and placement, in their order, whatever the size of a bucket."""
    mesh = init_device_mesh("cpu", (bench.place.world_size,))
    rows, columns, same = [Shard(0)], [Shard(1)], [Replicate()]
    kinds = [((5, 3), rows), ((1, 4), rows), ((7,), rows), ((4, 2), columns), ((4, 2, 3), rows), ((3,), same)]
    expected, tensors = {}, {}
    for number, (shape, placed) in enumerate(kinds * 2):
        values = torch.arange(math.prod(shape)).reshape(shape) + 100.0 * number
        values = values.to(torch.bfloat16 if number % 5 == 4 else torch.float32)
        expected[f"w{number}"] = values
        tensors[f"w{number}"] = distribute_tensor(values, mesh, placed)
    expected["plain"] = tensors["plain"] = torch.ones(2)
    for limit in (1, 100, 1 << 20):
        found = list(gathered(tensors.items(), limit))
        assert [name for name, _ in found] == list(expected)
        for name, tensor in found:
            assert type(tensor) is torch.Tensor, name
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), (limit, name, tensor)


def other_weights_on_a_machine(bench):
    paths = [bench.model(seed=seed) for seed in (1, 2)]
    with refused("two folders", "role 'actor'", "other weights on the machine of rank 1", "Copy one"):
        bench.engine(path=paths[bench.place.rank])


def a_head_is_fresh(bench):
    """A critic of a language model's folder read by parts has the values of one that the first rank read."""
    batch, found = bench.batch(), []
    for loading in ("broadcast", "sharded"):
        bench.settings["options"] = {"loading": loading}
        found.append(bench.infer(bench.engine(role="critic"), batch, ("values",))["values"])
    assert torch.equal(*found)


def a_folder_that_does_not_fit(bench):
    """A weight is missing in one rank's file, a folder has no safetensors: every rank is told."""
    from safetensors.torch import load_file, save_file

    path = Path(bench.model(seed=3))
    if bench.place.rank == 0:
        weights = load_file(path / "model.safetensors")
        weights["model.nrm.weight"] = weights.pop("model.norm.weight")
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    bench.barrier()
    words = ("model.norm.weight", "Did you mean 'model.nrm.weight'", "loading = 'broadcast'")
    with refused("a folder without a weight", *words):
        bench.engine(path=str(path))
    if bench.place.rank == 0:
        (path / "model.safetensors").unlink()
    bench.barrier()
    with refused("a folder without weights", "actor.fsdp.loading", "no folder with safetensors"):
        bench.engine(path=str(path))


def eight_bits(bench):
    """All linear layers but the head multiply in 8 bits; loss and gradient stay near, names and sampling as they are."""
    from torchao.float8.float8_linear import Float8Linear

    batch, reference = bench.batch(), bench.reference()
    expected = gradient_of(reference, nll_loss(reference, batch))
    engine = bench.engine(optim={**MEASURE})
    linear = {n: type(p) for n, p in engine.module.named_modules() if isinstance(p, nn.Linear)}
    assert {n for n, kind in linear.items() if not issubclass(kind, Float8Linear)} == {"lm_head"}
    assert not any(isinstance(p, Float8Linear) for p in engine.skeleton.module.modules())
    before = bench.weights(engine)
    identical(
        before, {n: v.float() for n, v in bench.reference().state_dict().items() if n in before}, "weights"
    )
    loss = bench.forward_backward(engine, batch).loss
    step = engine.optimizer_step()
    assert abs(loss / float(nll_loss(reference, batch)) - 1) < 0.05
    assert abs(step.grad_norm / norm_of(expected) - 1) < 0.1
    found = bench.gradient(engine, before)
    gap = sum(float((found[n].double() - v.double()).norm()) ** 2 for n, v in expected.items()) ** 0.5
    assert 1e-3 < gap / norm_of(expected) < EIGHT_BITS, gap / norm_of(expected)
    engine.save(bench.folder / "state").result()
    bench.barrier()
    after = bench.weights(engine)
    engine.load(bench.folder / "state")
    identical(bench.weights(engine), after, "weights of a checkpoint")


def one_scale_for_a_pack_is_no_leak(bench):
    """Rounding by the largest number of a pack is taken for what it is: sequences stay packed, and the loss near."""
    batch, reference = bench.batch(), bench.reference()
    engine = bench.engine(optim={**MEASURE})
    loss = bench.forward_backward(engine, batch).loss
    assert engine.forward.packs
    assert abs(loss / float(nll_loss(reference, batch)) - 1) < 0.05


def small_layers_are_refused(bench):
    """A model in which nothing is large enough for 8 bits."""
    small = nn.Sequential(nn.Linear(32, 32))
    with refused("a model of small layers", "actor.fsdp.fp8: 'rowwise'", "no linear layer of Sequential"):
        fp8.use_fp8(small, "rowwise", "actor.fsdp.fp8")
