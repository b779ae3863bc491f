"""Cases for ranks that share tokens or layers: functions of a bench, run by ``Workers``; see ``test_mesh.py``."""

from unittest import mock

import torch

from engine_core.config import ModelConfig, OptimConfig, RoleConfig
from engine_core.config.roles import LoRAConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.types import LossCall
from engine_plugin_fsdp.build import FSDPBuilder
from engine_plugin_fsdp.consistency import Probe
from engine_plugin_fsdp.engine import FSDPEngine
from engine_plugin_testing.contracts import close, refused, same_direction
from engine_plugin_testing.train_bench import MEASURE
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.options import TorchOptions
from engine_plugin_torch.rank_group import Together

VALUE = LossCall("value", {}, outputs=("values",))


def a_value_head_learns_as_alone(bench):
    """Values, scores, loss and the whole gradient are those of the engine ``torch`` in one process."""
    role, batch = bench.settings["role"], bench.batch()
    batch = batch.with_columns({"returns": torch.linspace(-1, 1, batch.num_tokens)})
    engine = bench.engine(role=role, optim=MEASURE)
    plain = alone(bench, engine, role)
    found = bench.infer(engine, batch, ("values", "scores"))
    expected = plain.infer(batch, ("values", "scores"))
    for name, value in expected.items():
        assert value.abs().max() > 1e-3, name
        close(found[name], value, 1e-5, name)
    batch = batch.with_columns({"values": expected["values"]})
    before = bench.weights(engine), bench.weights(plain)
    ours = bench.forward_backward(engine, batch, VALUE)
    theirs = plain.forward_backward(batch, VALUE)
    assert abs(ours.loss - theirs.loss) < 1e-5
    assert ours.metrics.keys() == theirs.metrics.keys()
    norms = engine.optimizer_step().grad_norm, plain.optimizer_step().grad_norm
    assert abs(norms[0] / norms[1] - 1) < 1e-6, norms
    gradients = bench.gradient(engine, before[0]), bench.gradient(plain, before[1])
    same_direction(*gradients, bench.gradient_tolerance, "gradient")


def alone(bench, engine, role):
    """The engine ``torch`` on the same model, with the whole batch on every rank."""
    made = TorchEngine(
        RoleConfig(backend=bench.name, options=TorchOptions(), optim=OptimConfig(**MEASURE)),
        ModelConfig(path=bench.model()),
        WorkerContext(plugins=engine.context.plugins, role=role, device=bench.device),
    )
    bench.stack.callback(made.close)
    return made


def the_same_numbers_are_drawn(bench):
    """After the start, and after a load of what ranks with data of their own saved, whatever they drew before."""
    options, bench.settings["options"] = bench.settings["options"], {}
    apart = bench.engine()
    torch.manual_seed(bench.place.rank)
    apart.save(bench.folder / "state").result()
    bench.barrier()
    bench.settings["options"] = options
    engine = bench.engine()
    drawn = engine.ranks.texts(torch.rand(3).tolist())
    assert drawn[0] == drawn[1], drawn
    engine.load(bench.folder / "state")
    drawn = engine.ranks.texts(torch.rand(3).tolist())
    assert drawn[0] == drawn[1], drawn


def what_a_rank_left_out_is_found(bench):
    """One rank forgets the others' part of a sum: every rank says which rank, and by how much."""
    with (
        broken(bench),
        refused(
            "a sum without a part", "role 'actor'", "on rank ", "'log_probs' of token", "actor.fsdp.probe"
        ),
    ):
        bench.engine()


def the_whole_does_not_run(bench):
    lacking = mock.patch.object(Probe, "_whole", side_effect=NotImplementedError("no such operator"))
    words = "actor.fsdp.probe = true", "does not run on the first rank's CPU", "no such operator"
    with lacking:
        with refused("a comparison that cannot be made", *words):
            bench.engine()
        bench.settings["options"] = {}
        bench.engine()  # nobody asked for it


def what_a_rank_left_out_is_not_looked_for(bench):
    with broken(bench):
        bench.engine()


def broken(bench):
    """Rank 1 takes its own part for the sum; it takes part in it, so that nobody waits."""
    summed = Together.forward

    def own(ctx, tensor, group):
        total = summed(ctx, tensor, group)
        return tensor.clone() if bench.place.rank == 1 else total

    return mock.patch.object(Together, "forward", own)


def refused_before_it_is_built(bench):
    path, built = bench.model(), AssertionError("a model was built")
    with (
        mock.patch.object(FSDPBuilder, "load", side_effect=built),
        refused("this model", *bench.settings["words"]),
    ):
        bench.engine(path=path)


def refused_adapter(bench):
    plugins = bench.load_plugins()
    config = RoleConfig(
        backend="fsdp",
        lora=LoRAConfig(**bench.settings["lora"]),
        optim=OptimConfig(lr=1e-2),
        options=bench.checked_options(plugins),
    )
    context = WorkerContext(
        plugins=plugins, role="actor", device=bench.device, rank=bench.place.rank, world_size=2
    )
    with refused("this adapter", *bench.settings["words"]):
        FSDPEngine(config, ModelConfig(path=bench.model(tied=False)), context)
