"""Cases for several ranks: functions of a bench, run by ``Workers``; see ``test_ranks.py``."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.tensor import DTensor

from engine_core.errors import DataError
from engine_plugin_testing.contracts import close, identical, refused
from engine_plugin_testing.reference import gradient_of, nll_loss, norm_of
from engine_plugin_testing.train_bench import MEASURE

OPTIM = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2, "weight_decay": 0.01}


def memory_is_spread(bench):
    """Each rank of a shard group holds its share of weights and optimizer state."""
    engine = bench.engine()
    bench.step(engine, bench.batch())
    assert all(isinstance(p, DTensor) for p in engine.module.parameters())
    every = sum(p.numel() for p in engine.module.parameters())
    local = sum(p.to_local().numel() for p in engine.module.parameters())
    moments = sum(
        v.to_local().numel()
        for s in engine.optimizer.state.values()
        for v in s.values()
        if isinstance(v, DTensor)
    )
    shards = engine.ranks.mesh.shape[-1]
    assert abs(local * shards / every - 1) < 0.05  # 97 rows on 2 ranks are 49 and 48
    assert moments == 2 * local


def nothing_stays_gathered(bench):
    """After infer and after forward_backward every parameter is a shard again."""
    engine, batch = bench.engine(), bench.batch()
    bench.infer(engine, batch)
    assert all(isinstance(p, DTensor) for p in engine.module.parameters())
    bench.forward_backward(engine, batch)
    assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in engine.module.parameters())


def a_rank_without_sequences_takes_part(bench):
    """One sequence for all ranks: gradient, loss and metrics are its own."""
    batch, module = bench.batch((9,)), bench.reference()
    expected = gradient_of(module, nll_loss(module, batch))
    engine = bench.engine(optim={**MEASURE})
    trained = bench.forward_backward(engine, batch)
    step = engine.optimizer_step()
    close(torch.tensor(trained.loss), nll_loss(module, batch).detach().float(), 1e-4, "loss")
    assert list(trained.metrics) == ["actor/nll"]
    assert abs(step.grad_norm / norm_of(expected) - 1) < 1e-5


def gradients_are_reduced_once(bench):
    """With gradient_sync = last, a batch of many micro-batches sends the gradients of each unit once."""
    engine = bench.engine(budget=12)
    batch, sent = bench.batch((9, 8, 9, 7) * 4), []
    reduce = groups.foreach_reduce

    def counted(*args, **kwargs):
        sent.append(1)
        return reduce(*args, **kwargs)

    groups.foreach_reduce = counted
    try:
        trained = bench.forward_backward(engine, batch)
    finally:
        groups.foreach_reduce = reduce
    units = len(engine._sharded)
    each = engine.options.gradient_sync == "each"
    assert trained.num_micro_batches > 2
    assert len(sent) == units * (trained.num_micro_batches if each else 1), (len(sent), units)


def save_for_another_world(bench):
    """Two steps, a checkpoint, two more: what the steps after it gave, for a run on other ranks to compare."""
    folder, batch = Path(bench.settings["shared"]), bench.batch()
    engine = bench.engine(optim=OPTIM)
    for _ in range(2):
        bench.step(engine, batch)
    engine.save(folder / "state").result()
    bench.barrier()
    weights = bench.weights(engine)
    told = [_told(bench, engine, batch) for _ in range(2)]
    if bench.place.rank == 0:
        torch.save(weights, folder / "weights.pt")
        (folder / "steps.json").write_text(json.dumps(told))


def go_on_from_another_world(bench):
    """The same weights, then the same loss, norm and rate in the next two steps, up to float32."""
    folder, batch = Path(bench.settings["shared"]), bench.batch()
    engine = bench.engine(optim=OPTIM, path=bench.model(seed=1))
    engine.load(folder / "state")
    identical(bench.weights(engine), torch.load(folder / "weights.pt"), "weights from another world")
    for number, expected in enumerate(json.loads((folder / "steps.json").read_text())):
        found = _told(bench, engine, batch)
        for name, value in expected.items():
            assert abs(found[name] - value) <= 1e-4 * abs(value), (number, name, found[name], value)


def pass_on_to_another_world(bench):
    """Loaded and saved again: what follows is as if it had never been here."""
    folder = Path(bench.settings["shared"])
    engine = bench.engine(optim=OPTIM, path=bench.model(seed=2))
    engine.load(folder / "state")
    identical(bench.weights(engine), torch.load(folder / "weights.pt"), "weights from another world")
    engine.save(folder / "again").result()


def go_on_exactly(bench):
    """Weights, loss, norm and rate bit for bit those of the run that stayed."""
    folder, batch = Path(bench.settings["shared"]), bench.batch()
    engine = bench.engine(optim=OPTIM, path=bench.model(seed=1))
    engine.load(folder / "again")
    identical(bench.weights(engine), torch.load(folder / "weights.pt"), "weights from another world")
    assert [_told(bench, engine, batch) for _ in range(2)] == json.loads((folder / "steps.json").read_text())


def _told(bench, engine, batch):
    loss = bench.forward_backward(engine, batch).loss
    step = engine.optimizer_step()
    return {"loss": loss, "grad_norm": step.grad_norm, "lr": step.lr}


def half_a_checkpoint_is_refused(bench):
    """A file of one rank is missing, then a part of a weight: both are told, and nothing was changed."""
    engine, folder = bench.engine(), bench.folder / "state"
    engine.save(folder).result()
    bench.barrier()
    before = bench.weights(engine)
    lost = folder / "weights-00001-of-00002.safetensors"
    if bench.place.rank == 0:
        lost.rename(folder / "elsewhere")
    bench.barrier()
    with refused("a checkpoint without a rank's file", lost.name):
        engine.load(folder)
    identical(bench.weights(engine), before, "weights after a refused load")


def saving_goes_on_beside_training(bench):
    """The files hold the weights of the moment of saving, though a step follows before they are written."""
    engine, batch = bench.engine(optim=OPTIM), bench.batch()
    bench.step(engine, batch)
    before = bench.weights(engine)
    done = engine.save(bench.folder / "state")
    bench.step(engine, batch)
    done.result()
    bench.barrier()
    engine.load(bench.folder / "state")
    identical(bench.weights(engine), before, "weights that were saved")


def fp16_scales_and_recovers(bench):
    """An overflow skips the step on all ranks and halves the scale; then steps go on, with unscaled norms."""
    batch = bench.batch()
    module = bench.reference()
    norm = norm_of(gradient_of(module, nll_loss(module, batch)))
    engine = bench.engine(optim={"lr": 0.0})
    first = engine.loss_scale.factor
    steps = [bench.step(engine, batch) for _ in range(12)]
    skipped = [step.skipped for step in steps]
    assert skipped[0], skipped
    assert not skipped[-1], skipped
    assert [step.rescaled for step in steps] == skipped
    assert engine.loss_scale.factor == first / 2 ** sum(skipped)
    assert abs(steps[-1].grad_norm / norm - 1) < 2e-2, (steps[-1].grad_norm, norm)
    engine.save(bench.folder / "state").result()
    bench.barrier()
    again = bench.engine(optim={"lr": 0.0})
    again.load(bench.folder / "state")
    assert again.loss_scale.state() == engine.loss_scale.state()
    broken = bench.step(engine, batch.with_columns({"weights": batch["weights"] * math.inf}))
    assert (broken.skipped, broken.rescaled) == (True, False)  # no scale helps a loss that is not finite
    assert engine.loss_scale.factor == again.loss_scale.factor


def one_step(bench):
    """Loss and norm of one step, beside the reference's."""
    batch = bench.batch()
    module = bench.reference()
    expected = gradient_of(module, nll_loss(module, batch))
    found, _, _ = bench.measured(batch)
    for name, value in expected.items():
        gap = float((found[name].double() - value.double()).norm())
        limit = bench.gradient_tolerance * max(float(value.double().norm()), 1e-3 * norm_of(expected))
        assert gap <= limit, f"{name}: {gap} > {limit}"


def critic_learns_as_alone(bench):
    """A critic's values and the norm of its gradient do not depend on ranks: torch's own engine gives the same."""
    from engine_core.config import ModelConfig, OptimConfig, RoleConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.types import LossCall
    from engine_plugin_torch.engine import TorchEngine
    from engine_plugin_torch.options import TorchOptions

    batch = bench.batch().with_columns(
        {"returns": torch.linspace(-1, 1, sum(bench.batch().lengths.tolist()))}
    )
    engine = bench.engine(role="critic")
    plain = TorchEngine(
        RoleConfig(backend=bench.name, options=TorchOptions(), optim=OptimConfig(lr=1e-2)),
        ModelConfig(path=bench.model()),
        WorkerContext(plugins=engine.context.plugins, role="critic", device=bench.device),
    )
    values = bench.infer(engine, batch, ("values",))["values"]
    close(values, plain.infer(batch, ("values",))["values"], 1e-5, "values")
    call = LossCall("value", {}, outputs=("values",))
    batch = batch.with_columns({"values": values})
    ours = bench.forward_backward(engine, batch, call)
    theirs = plain.forward_backward(batch, call)
    assert abs(ours.loss - theirs.loss) < 1e-5
    assert ours.metrics.keys() == theirs.metrics.keys()
    assert abs(engine.optimizer_step().grad_norm / plain.optimizer_step().grad_norm - 1) < 1e-5


def the_norm_is_the_references(bench):
    """One step's norm is that of float64, each sequence alone, whatever is packed with what and on however many ranks."""
    from engine_core.config import ModelConfig, OptimConfig, RoleConfig
    from engine_core.contracts.engines import WorkerContext

    batch = bench.batch((9, 8, 9, 7, 3, 12, 5) * 3)
    module = bench.reference()
    expected = norm_of(gradient_of(module, nll_loss(module, batch)))
    plugins, world = bench.load_plugins(), {"rank": bench.place.rank, "world_size": bench.place.world_size}
    for attention, budget in (("varlen", 4096), ("varlen", 20), ("sdpa", 4096), ("sdpa", 1)):  # 1: each alone
        context = WorkerContext(plugins=plugins, role="actor", device=bench.device, **world)
        config = RoleConfig(
            backend="fsdp",
            max_tokens_per_rank=budget,
            optim=OptimConfig(lr=0.0),
            options=bench.checked_options(plugins),
        )
        model = ModelConfig(path=bench.model(), attention=attention)
        engine = plugins.resolve("train_engines", "fsdp")(config, model, context)
        bench.stack.callback(engine.close)
        sequences = len(bench.share(engine, batch)[1])
        trained = bench.forward_backward(engine, batch)
        assert (trained.num_micro_batches >= sequences) == (budget == 1)
        found = engine.optimizer_step().grad_norm
        assert abs(found / expected - 1) < 1e-6, (attention, budget, found, expected)


def another_models_checkpoint_is_refused(bench):
    """A wider model's shards: told with a weight and both shapes, and nothing was changed."""
    engine, folder = bench.engine(), bench.folder / "state"
    engine.save(folder).result()
    bench.barrier()
    other = bench.engine(path=bench.settings["other"])
    before = bench.weights(other)
    with refused("a checkpoint of another model", "has shape", "expected", "Weight '"):
        other.load(folder)
    identical(bench.weights(other), before, "weights after a refused load")


def a_lent_module_is_the_whole_actor(bench):
    """What a phase samples from has the actor's weights to the bit; after it the shards are as they were."""
    from engine_plugin_processes.shared_module import SharedModuleHolder, fits

    engine = bench.engine()
    bench.step(engine, bench.batch())
    expected, shards = bench.weights(engine), [p.to_local().clone() for p in engine.module.parameters()]
    lender = SharedModuleHolder(engine)
    with pytest.raises(RuntimeError, match="not lent"), lender.generation_module():
        pass
    for _ in range(2):
        lender.lend()
        lender.lend()  # nothing: it is lent
        assert torch.is_grad_enabled()
        for _ in range(1 + bench.place.rank):  # ranks do not sample in step
            with lender.generation_module() as module:
                assert not torch.is_grad_enabled()
                found = dict(module.named_parameters())
                for name, value in expected.items():
                    assert name not in found or torch.equal(found[name], value), name
                assert found
                module(input_ids=torch.ones(1, 3, dtype=torch.int64))
        lender.take_back()
        assert all(p.device.type == "meta" for p in module.parameters())
    assert all(isinstance(p, DTensor) for p in engine.module.parameters())
    for before, now in zip(shards, engine.module.parameters(), strict=True):
        assert torch.equal(before, now.to_local())
    assert fits(engine, bench.device)
    bench.step(engine, bench.batch())


def a_module_that_does_not_fit_on_one_rank_is_lent_on_none(bench):
    from engine_plugin_processes import shared_module as lending

    engine = bench.engine()
    room = lending.free_bytes
    lending.free_bytes = lambda device: 0 if bench.place.rank else 2**40
    try:
        assert not lending.fits(engine, bench.device)
    finally:
        lending.free_bytes = room


def what_is_lent(bench):
    assert bench.engine().lends_whole == bench.settings["lends"]


def a_policy_that_names_nothing_is_refused(bench):
    words = ("actor.fsdp.wrap", "named no submodule of Qwen3ForCausalLM", "actor.fsdp.wrap.layer_classes")
    with refused("no units", *words):
        bench.engine()
    bench.settings["options"] = {"sharding": "none"}
    bench.engine()


def no_units_are_told(bench):
    import logging

    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("engine").addHandler(handler)
    try:
        bench.engine()
    finally:
        logging.getLogger("engine").removeHandler(handler)
    assert any("actor.fsdp.wrap: there are no units" in text for text in told), told


def refusals(bench):
    """What does not fit is refused with its key before a model is built."""
    for options, words in bench.settings["refused"]:
        bench.settings["options"] = options
        with refused(str(options), *words):
            bench.engine()


def only_the_first_rank_reads(bench):
    """The others have no file of the model open, and the same weights; an adapter, too, is that of the first."""
    from engine_plugin_torch.build import ModelBuilder

    read = []
    load = ModelBuilder.load

    def counted(self, *arguments):
        read.append(1)
        return load(self, *arguments)

    ModelBuilder.load = counted
    try:
        for path in (bench.model(tied=True), bench.model(tied=False)):
            engine = bench.engine(path=path)
            expected = {name: value.float() for name, value in bench.reference(path).state_dict().items()}
            for name, value in bench.weights(engine).items():
                assert torch.equal(value, expected[name]), name
    finally:
        ModelBuilder.load = load
    assert len(read) == (2 if bench.place.rank == 0 else 0)


def a_folder_that_does_not_load_fails_everywhere(bench):
    """The first rank's error reaches all ranks; none waits for it."""
    path = Path(bench.model(seed=3))
    if bench.place.rank == 0:
        (path / "model.safetensors").write_bytes(b"no weights")
    bench.barrier()
    # transformers has one of its own for a broken file
    own = Exception if bench.place.rank == 0 else DataError
    with pytest.raises(own, match="" if bench.place.rank == 0 else "rank 0"):
        bench.engine(path=str(path))


def an_adapter_learns_as_alone(bench):
    """Norms, merged weights, adapter tensors and the base's log-probs are those of the engine ``torch``."""
    from engine_core.config import ModelConfig, OptimConfig, RoleConfig
    from engine_core.config.roles import LoRAConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_plugin_torch.engine import TorchEngine
    from engine_plugin_torch.options import TorchOptions

    batch, model = bench.batch(), ModelConfig(path=bench.model())
    plugins, world = bench.load_plugins(), {"rank": bench.place.rank, "world_size": bench.place.world_size}
    lora = LoRAConfig(
        rank=3, modules_to_save=bench.settings.get("whole", []), dora=bench.settings.get("dora", False)
    )
    made = []
    for kind, options, place in (
        (plugins.resolve("train_engines", "fsdp"), bench.checked_options(plugins), world),
        (TorchEngine, TorchOptions(), {}),
    ):
        config = RoleConfig(backend="fsdp", lora=lora, optim=OptimConfig(lr=1e-2, eps=1e-3), options=options)
        context = WorkerContext(plugins=plugins, role="actor", device=bench.device, **place)
        made.append(kind(config, model, context))
    engine, plain = made
    bench.stack.callback(engine.close)
    for _ in range(3):
        norms = bench.step(engine, batch).grad_norm, bench.step(plain, batch).grad_norm
        assert abs(norms[0] / norms[1] - 1) < 1e-4, norms
    for adapter in (True, False):
        expected = dict(plain.named_weights(adapter=adapter))
        for name, value in engine.named_weights(adapter=adapter):
            close(value, expected.pop(name), 1e-4, name)
        assert not expected
    base = engine.infer(bench.share(engine, batch)[1], ("log_probs",), adapter=False)["log_probs"]
    alone = plain.infer(bench.share(engine, batch)[1], ("log_probs",), adapter=False)["log_probs"]
    close(base, alone, 1e-4, "log_probs of the base")
    assert engine.adapter.base_identity() == plain.adapter.base_identity()
    bench.step(engine, batch)  # the base's pass left the adapter trainable
    engine.export(bench.folder / "adapter", adapter=True)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if bench.place.rank == 0:
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model.path), bench.folder / "adapter")


def roles_share_their_groups(bench):
    first, other = bench.engine(), bench.engine(trainable=False, role="ref")
    assert first.ranks.mesh is other.ranks.mesh
    assert first.ranks.slice is other.ranks.slice


def another_model_on_a_rank(bench):
    with refused(
        "a model that differs between ranks", "other weights on rank 1", "embed_tokens.weight", "model.seed"
    ):
        bench.engine()


def nobody_shards(bench):
    with refused("a model with its own optimizer on two ranks", "would not be summed over the 2 ranks"):
        bench.engine()


def refused_model(bench):
    with refused("this model", *bench.settings["words"]):
        bench.engine(role=bench.settings.get("role", "actor"))
