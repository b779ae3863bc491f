"""Cases for several ranks: functions of a bench, run by ``Workers``; see ``test_ranks.py``."""

import functools
import gc
import math
import time
import weakref

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from engine_core.config import ModelConfig, OptimConfig, RoleConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.errors import ConfigError
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import LossCall
from engine_plugin_megatron.heads import ShardedDistribution
from engine_plugin_megatron.layout import layout_of
from engine_plugin_testing.contracts import close, identical, near
from engine_plugin_testing.reference import gradient_of, nll_loss, norm_of, outputs_of
from engine_plugin_testing.train_bench import NLL, POLICY
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.log_probs import OUTPUTS, Distribution, gather_outputs
from engine_plugin_torch.sharded_checkpoint import OffloadedBuffers
from engine_plugin_torch.shards import Shards

OPTIM = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2, "weight_decay": 0.01}


def alone(bench, role="actor", optim=None, trainable=True):
    """The reference engine on the same folder, in this rank by itself."""
    plugins = PluginSet.load({"train_engines": {"torch"}, "losses": {"ppo_clip"}})
    config = RoleConfig(backend="torch", max_tokens_per_rank=4096, optim=OptimConfig(**(optim or OPTIM)))
    context = WorkerContext(plugins=plugins, role=role, device=torch.device("cpu"), total_steps=10)
    made = TorchEngine(config, ModelConfig(path=bench.model()), context, trainable=trainable)
    bench.stack.callback(made.close)
    return made


def steps_as_alone(bench):
    """Loss, metrics, norm and rate of three steps are those of the `torch` engine; of the first to five digits."""
    engine, torch_engine = bench.engine(optim=OPTIM, budget=24), alone(bench)
    batch = bench.batch(temperature=0.9)
    batch.token_ids[[4, 13, 20]] = 0  # padding, sampled: transformers gives its embedding no gradient there
    old = torch_engine.infer(batch, ["log_probs"])["log_probs"]
    batch = batch.with_columns({"old_log_probs": old, "rollout_log_probs": old})
    for number in range(3):
        found, expected = (
            bench.forward_backward(engine, batch, POLICY),
            torch_engine.forward_backward(batch, POLICY),
        )
        tolerance = 1e-5 if number == 0 else 1e-3
        assert found.metrics.keys() == expected.metrics.keys()
        assert abs(found.loss - expected.loss) <= tolerance * max(abs(expected.loss), 1e-2)
        one, two = engine.optimizer_step(), torch_engine.optimizer_step()
        near(one.grad_norm, two.grad_norm, tolerance, f"norm of step {number + 1}")
        assert one.lr == two.lr


def gradients_as_alone(bench):
    """Log-probs and the gradient of every weight are those of a float64 model in one process, to 1e-5."""
    batch, module = bench.batch(temperature=0.8), bench.reference()
    expected = gradient_of(module, nll_loss(module, batch))
    with torch.no_grad():
        outputs = outputs_of(module, batch)
    engine = bench.engine(trainable=False, role="ref")
    for name, found in bench.infer(engine, batch, ("log_probs", "entropy")).items():
        close(found, outputs[name], 1e-5, name)
    for budget in (4096, 24):
        gradient, _, step = bench.measured(batch, budget=budget)
        for name, value in expected.items():
            close(gradient[name], value, 1e-5, f"gradient of '{name}' with a budget of {budget}")
        near(step.grad_norm, norm_of(expected), 1e-5, "its norm")


def steps_with_breaks_as_alone(bench):
    """As a run takes them: asleep while responses are sampled, weights given away, a checkpoint after every second step."""
    engine, torch_engine, batch = bench.engine(optim=OPTIM), alone(bench), bench.batch()
    for number in range(4):
        norms = []
        for one in (engine, torch_engine):
            bench.forward_backward(one, batch)
            norms.append(one.optimizer_step().grad_norm)
        near(*norms, 1e-3, f"norm of step {number + 1}")
        if number % 2:
            engine.save(bench.folder / f"state{number}").result()
        bench.weights(engine)
        engine.sleep(keep=("weights",))
        bench.weights(engine)
        engine.wake()


def values_as_alone(bench):
    """A critic's values, its loss and the norm of its gradient are those of the `torch` engine."""
    engine, torch_engine = bench.engine(role="critic", optim=OPTIM), alone(bench, "critic")
    batch = bench.batch()
    found = bench.infer(engine, batch, ("values", "scores"))
    for name, expected in torch_engine.infer(batch, ["values", "scores"]).items():
        close(found[name], expected, 1e-6, name)
    returns = torch.linspace(-1, 1, batch.num_tokens)
    batch = batch.with_columns({"returns": returns, "values": found["values"]})
    loss = LossCall("value", {}, outputs=("values",))
    near(
        bench.forward_backward(engine, batch, loss).loss,
        torch_engine.forward_backward(batch, loss).loss,
        1e-5,
        "loss of a critic",
    )
    near(engine.optimizer_step().grad_norm, torch_engine.optimizer_step().grad_norm, 1e-5, "norm of a critic")


def a_frozen_role_gives_log_probs_alone(bench):
    """A reference has no optimizer and no gradients, gives the log-probs of the folder, and takes other weights."""
    engine = bench.engine(role="ref", trainable=False)
    batch = bench.batch()
    expected = alone(bench, "ref", trainable=False).infer(batch, ["log_probs"])["log_probs"]
    close(bench.infer(engine, batch)["log_probs"], expected, 1e-5, "log_probs of a reference")
    assert engine.steps is None
    assert engine.optimizer is None
    assert not any(p.requires_grad for p in engine.module.parameters())
    with pytest.raises(RuntimeError, match="no optimizer"):
        bench.forward_backward(engine, batch)
    before = bench.weights(engine)
    other = bench.engine(path=bench.model(seed=1))
    new = bench.weights(other)
    engine.load_named_weights(other.named_weights(), mix=0.25)
    mixed = {name: torch.lerp(value, new[name], 0.25) for name, value in before.items()}
    identical(bench.weights(engine), mixed, "a quarter of the new weights", exact=False)


def each_parameter_has_its_own_step_count(bench):
    """After a load every parameter's step count is a tensor of its own, and grows by one with a step.

    megatron-core's own load gives all parameters one tensor, which grows by their number.
    """
    engine, batch = bench.engine(optim=OPTIM), bench.batch()
    for _ in range(2):
        bench.step(engine, batch)
    engine.save(bench.folder / "state").result()
    bench.barrier()
    loaded = bench.engine(optim=OPTIM, path=bench.model(seed=1))
    loaded.load(bench.folder / "state")
    counts = [state["step"] for inner in loaded.steps._inner() for state in inner.optimizer.state.values()]
    assert len({count.data_ptr() for count in counts}) == len(counts) > 1
    for inner in loaded.steps._inner():  # a fused optimizer (apex) has it here
        assert {group["step"] for group in inner.optimizer.param_groups} == {2}
    bench.step(loaded, batch)
    bench.step(engine, batch)
    counts = [state["step"] for inner in loaded.steps._inner() for state in inner.optimizer.state.values()]
    assert {float(count) for count in counts} == {3.0}
    identical(bench.weights(loaded), bench.weights(engine), "weights a step after load", bench.exact)


def fp16_scales_and_recovers(bench):
    """An overflow skips the step on all ranks and halves the scale, which a checkpoint keeps; then norms are unscaled ones."""
    batch, module = bench.batch(), bench.reference()
    norm = norm_of(gradient_of(module, nll_loss(module, batch)))
    engine = bench.engine(optim={"lr": 0.0})
    before, first = bench.weights(engine), engine.loss_scale.factor
    steps = [bench.step(engine, batch) for _ in range(16)]
    skipped = [step.skipped for step in steps]
    assert skipped[0]
    assert not skipped[-1]
    assert engine.num_skipped_steps == sum(skipped)
    assert engine.loss_scale.factor == first / 2 ** sum(skipped)
    assert abs(steps[-1].grad_norm / norm - 1) < 2e-2
    identical(bench.weights(engine), before, "weights after steps of rate 0")
    engine.save(bench.folder / "state").result()
    bench.barrier()
    again = bench.engine(optim={"lr": 0.0})
    again.load(bench.folder / "state")
    assert vars(again.loss_scale) == vars(engine.loss_scale)
    broken = bench.step(engine, batch.with_columns({"weights": batch["weights"] * math.inf}))
    assert (broken.skipped, broken.rescaled) == (True, False)  # no scale helps a loss that is not finite
    assert engine.loss_scale.factor == again.loss_scale.factor


def the_copy_that_is_stepped_is_not_rounded(bench):
    """Of a folder in float32 the optimizer steps float32 weights, and a checkpoint has them, whatever is computed with."""
    engine = bench.engine()
    folder = load_file(f"{bench.model()}/model.safetensors")
    engine.save(bench.folder / "state").result()
    bench.barrier()
    shards = Shards(bench.folder / "state", "weights")
    identical({name: shards.whole(name) for name in folder}, folder, "weights of a checkpoint")
    rounded = {name: value.bfloat16() for name, value in folder.items()}
    identical(bench.weights(engine), rounded, "weights that are given away")


def a_loss_is_reported_as_it_was(bench):
    """A metric that is the loss tensor itself is the loss, in several micro-batches: nothing divides it in place."""
    engine, batch = bench.engine(budget=12), bench.batch((9, 8, 9, 7) * 4)
    resolve = engine._resolve

    def told(loss):
        objective = resolve(loss)

        def with_itself(outputs, micro):
            value, metrics = objective(outputs, micro)
            return value, {**metrics, "same": value}

        return with_itself

    engine._resolve = told
    found = bench.forward_backward(engine, batch)
    assert found.num_micro_batches > 2
    near(found.metrics["same"], found.loss, 1e-5, "the loss as a metric")
    near(found.loss, alone(bench).forward_backward(batch, NLL).loss, 1e-5, "the loss")


def gradients_of_split_logits(bench):
    """Every output of logits that ranks share, and its gradient, is that of whole logits."""
    from megatron.core import parallel_state

    bench.engine()
    group = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(0)
    size, padded, n, width = 13, 14, 6, 5
    rows = torch.randn(n, width, generator=generator)
    weight = torch.randn(padded, width, generator=generator)
    columns = {
        "candidate_ids": torch.rand(n, size, generator=generator).argsort(-1)[:, :3],
        "support_ids": torch.rand(n, size, generator=generator).argsort(-1)[:, :4].int(),
    }
    columns["support_ids"][::2] = -1
    targets = torch.randint(size, (n,), generator=generator)
    targets[1::2] = columns["support_ids"][1::2, 0].long()
    share = padded // group.size()
    first = share * group.rank()

    def computed(kind, begin, end, k):
        own = weight[begin:end].clone().requires_grad_()

        def logits_of(part):
            logits = part @ own.T
            return torch.where(torch.arange(begin, end) < size, logits, -3e4)

        found = gather_outputs(
            logits_of,
            rows,
            targets,
            temperature=0.7,
            chunk=4,
            grad=OUTPUTS,
            columns=columns,
            top_k=k,
            kind=kind,
        )
        sum(value.sum() for value in found.values() if value.requires_grad).backward()
        return found, own.grad

    split = functools.partial(ShardedDistribution, group=group, size=size)
    for k in (2, size):
        found, gradient = computed(split, first, first + share, k)
        expected, whole = computed(Distribution, 0, size, k)
        for name, value in expected.items():
            if name == "top_ids":
                assert torch.equal(found[name], value)
            else:
                close(found[name], value, 1e-4, name)
        end = min(first + share, size)
        close(gradient[: end - first], whole[first:end], 1e-4, "gradient of the head")
        assert not gradient[end - first :].any(), "rows of padding have a gradient"


def what_does_not_fit_is_refused(bench):
    """Before groups are made: by its key, with the nearest layout that fits."""
    from megatron.core import parallel_state

    for options, words in bench.settings["refused"]:
        config = bench.settings["options"]
        bench.settings["options"] = options
        with pytest.raises(ConfigError) as raised:
            bench.engine()
        bench.settings["options"] = config
        text = str(raised.value)
        assert all(word in text for word in words), text
        assert not parallel_state.model_parallel_is_initialized()


def one_layout_a_process(bench):
    """Another role with another layout in the same processes is refused, naming both."""
    bench.engine()
    bench.settings["options"] = {}
    with pytest.raises(ConfigError, match="the role 'actor' in the same processes has tp 2, dp 1"):
        bench.engine(role="ref", trainable=False)


def memory_is_given_back(bench):
    """Asleep, the device holds nothing of the role; awake it goes on bit for bit."""
    engine, batch = bench.engine(optim=OPTIM), bench.batch()
    bench.step(engine, batch)
    before = bench.weights(engine)
    held = [t for part in ("weights", "gradients", "optimizer") for t in engine.store._memory_of(part)]
    assert sum(t.untyped_storage().nbytes() for t in held) > 0
    engine.sleep()
    assert sum(t.untyped_storage().nbytes() for t in held) == 0
    engine.wake(only=["weights"])
    identical(bench.weights(engine), before, "weights after sleep")
    with pytest.raises(RuntimeError, match="asleep"):
        bench.forward_backward(engine, batch)
    engine.wake()
    assert OffloadedBuffers()._kept == []
    assert not any(buffer.any() for buffer in engine.steps.gradient_buffers())


def optimizer_state_is_spread(bench):
    """With the distributed optimizer a rank holds its share of the state of its copy of the model."""
    engine = bench.engine()
    bench.step(engine, bench.batch())
    weights = sum(p.numel() for p in engine.module.parameters())
    moments = sum(
        v.numel()
        for inner in engine.steps._inner()
        for s in inner.optimizer.state.values()
        for v in s.values()
        if v.ndim
    )
    share = engine.layout.dp_size if engine.options.distributed_optimizer else 1
    assert abs(moments * share / (2 * weights) - 1) < 0.2
    assert layout_of(engine.options, bench.place.world_size, "actor") == engine.ranks.mesh


def nothing_is_left_of_a_closed_engine(bench):
    """Weights, buffers of gradients and state of the optimizer are gone with the engine that held them, from memory too."""
    engine = bench.engine()
    for _ in range(2):
        bench.step(engine, bench.batch())
    weights, state = (
        list(engine.module.parameters()),
        [*engine.steps.tensors(), *engine.steps.gradient_buffers()],
    )
    held = [weakref.ref(part) for part in (*engine.models, engine.steps, *weights)]
    memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in (*weights, *state)]
    del weights, state
    engine.close()
    gc.collect()
    # a thread of gloo lets go of its last collective's tensors a moment after it has told that this is done
    deadline = time.monotonic() + 10
    while any(ref() is not None for ref in held) or not all(storage.expired() for storage in memory):
        assert time.monotonic() < deadline, "an engine that was closed holds weights, gradients or state"
        time.sleep(0.01)
