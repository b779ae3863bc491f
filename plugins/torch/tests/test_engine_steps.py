"""Optimizer steps, weights, state and memory of the reference engine."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from engine_core.errors import DataError, PluginError
from engine_core.types import LossCall
from engine_plugin_torch.engine import TorchEngine

NLL = LossCall("nll")


def weights_of(engine):
    return {name: value.cpu().clone() for name, value in engine.named_weights()}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def train(engine, batch, steps=1):
    outputs = []
    for _ in range(steps):
        loss = engine.forward_backward(batch, NLL).loss
        outputs.append((loss, engine.optimizer_step()))
    return outputs


# -- a step ------------------------------------------------------------------


def test_training_lowers_the_loss(make_engine, batch):
    losses = [loss for loss, _ in train(make_engine(), batch, steps=5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]


def test_the_gradient_norm_is_measured_before_clipping_to_max_grad_norm(make_engine, batch):
    engine = make_engine(optim={"max_grad_norm": 0.25})
    engine.forward_backward(batch, NLL)
    expected = torch.cat([p.grad.flatten() for p in engine.module.parameters()]).norm().item()
    assert expected > 0.25
    seen = []
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(float(engine._grad_norm())))
    assert engine.optimizer_step().grad_norm == pytest.approx(expected, rel=1e-5)
    assert seen == [pytest.approx(0.25, rel=1e-4)]


def test_max_grad_norm_0_does_not_clip(make_engine, batch):
    engine = make_engine(optim={"max_grad_norm": 0})
    engine.forward_backward(batch, NLL)
    seen = []
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(float(engine._grad_norm())))
    assert engine.optimizer_step().grad_norm == seen[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_step_and_leaves_everything_alone(make_engine, batch, bad):
    engine = make_engine(optim={"schedule": "linear"})
    train(engine, batch)
    weights, optimizer = weights_of(engine), copy.deepcopy(engine.optimizer.state_dict())
    lr = engine.lr
    engine.forward_backward(batch, NLL)
    next(engine.module.parameters()).grad[0, 0] = bad
    step = engine.optimizer_step()
    assert step.skipped
    assert step.grad_norm != step.grad_norm or step.grad_norm == float("inf")
    assert same(weights_of(engine), weights)
    assert str(engine.optimizer.state_dict()) == str(optimizer)
    assert engine.lr == lr
    assert all(p.grad is None for p in engine.module.parameters())
    assert engine.num_skipped_steps == 1
    assert not train(engine, batch)[0][1].skipped


def test_a_reference_has_no_optimizer_and_no_gradients(make_engine, batch):
    engine = make_engine(role="ref", trainable=False)
    assert engine.optimizer is None
    assert not any(p.requires_grad for p in engine.module.parameters())
    engine.infer(batch, ["log_probs"])
    with pytest.raises(RuntimeError, match="role 'ref' is not trained"):
        engine.optimizer_step()


def test_activation_checkpointing_changes_neither_gradients_nor_names(make_engine, batch):
    plain, recomputed = make_engine(), make_engine(activation_checkpointing=True)
    calls = {}
    for engine in (plain, recomputed):
        engine.module.model.layers[0].self_attn.register_forward_hook(
            lambda *_, engine=engine: calls.update({engine: calls.get(engine, 0) + 1})
        )
        engine.forward_backward(batch, NLL)
    assert calls[recomputed] == calls[plain] + 1  # in the backward pass
    found = dict(recomputed.module.named_parameters())
    for name, parameter in plain.module.named_parameters():
        assert torch.equal(found[name].grad, parameter.grad)


# -- precision ---------------------------------------------------------------


def test_bf16_compute_keeps_fp32_weights_and_gradients(make_engine, batch):
    exact, mixed = make_engine(), make_engine(compute_dtype="bf16")
    for engine in (exact, mixed):
        engine.forward_backward(batch, NLL)
    for one, other in zip(exact.module.parameters(), mixed.module.parameters(), strict=True):
        assert (other.dtype, other.grad.dtype) == (torch.float32, torch.float32)
        assert 0 < (one.grad - other.grad).norm() / one.grad.norm() < 0.05


def test_bf16_weights_leave_the_rope_frequencies_in_fp32(make_engine, batch):
    engine = make_engine(param_dtype="bf16")
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in engine.module.buffers()} == {torch.float32}
    train(engine, batch)


def test_fp32_compute_over_bf16_weights_is_refused(make_engine):
    with pytest.raises(ValueError, match="compute_dtype 'fp32' over param_dtype 'bf16' has no effect"):
        make_engine(param_dtype="bf16", compute_dtype="fp32")


# -- building ----------------------------------------------------------------


class Small(nn.Module):
    """A model of the user's own: tokens do not meet, only ``forward``, no config."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(97, 8), nn.Linear(8, 97)
        self.seen = []

    def forward(self, input_ids, position_ids):
        self.seen.append(position_ids.tolist())
        running = self.embed(input_ids).cumsum(1)  # mixes everything it is given
        return self.head(running)


def test_build_model_may_give_any_module_which_never_sees_two_sequences_at_once(make_engine, batch):
    module = Small()
    engine = make_engine(hooks={"engine_build_model": lambda role, model_config, options: module})
    assert engine.module is module
    before = engine.infer(batch, ["log_probs"])["log_probs"]
    assert all(positions[0] == list(range(len(positions[0]))) for positions in module.seen)
    changed = batch.token_ids.clone()
    changed[0] = (changed[0] + 1) % 97
    batch.token_ids = changed
    after = engine.infer(batch, ["log_probs"])["log_probs"]
    assert torch.equal(after[7:], before[7:])
    losses = [loss for loss, _ in train(engine, batch, steps=3)]
    assert losses[-1] < losses[0]


def test_step_hooks_are_asked_in_order_with_the_roles_options(make_engine):
    asked = []

    def wrap(role, module, options):
        asked.append(("wrap", role))
        return ["model.layers.1"]

    def shard(role, module, units, options):
        asked.append(("shard", units))
        assert options.log_prob_chunk_tokens == 5
        return

    def optimizer(role, module, optim_config, options):
        asked.append(("optimizer", optim_config.lr))
        sgd = torch.optim.SGD(module.parameters(), lr=optim_config.lr)
        return sgd, torch.optim.lr_scheduler.ConstantLR(sgd)

    engine = make_engine(
        hooks={"engine_wrap_policy": wrap, "engine_shard_model": shard, "engine_build_optimizer": optimizer},
        log_prob_chunk_tokens=5,
        optim={"lr": 0.5},
    )
    assert asked == [("wrap", "actor"), ("shard", ["model.layers.1"]), ("optimizer", 0.5)]
    assert isinstance(engine.optimizer, torch.optim.SGD)


def test_an_unknown_unit_is_named(make_engine):
    hooks = {"engine_wrap_policy": lambda role, module, options: ["model.layer.0"]}
    with pytest.raises(
        PluginError,
        match=r"'model.layer.0', which is no submodule of Qwen3ForCausalLM. Did you mean 'model.layers.0'",
    ):
        make_engine(hooks=hooks)


def test_an_override_that_returns_a_module_is_finished_by_the_engine(make_engine, batch):
    class Mixin:
        def _build_model_optimizer(
            self, *, model_path, engine_config, optim_config, override_model_config, role="actor"
        ):
            assert (engine_config.log_prob_chunk_tokens, optim_config.lr, role) == (1024, 1e-2, "actor")
            return Small()

    engine = make_engine(cls=type("Mine", (Mixin, TorchEngine), {}))
    assert isinstance(engine.optimizer, torch.optim.AdamW)
    assert not train(engine, batch)[0][1].skipped


def test_an_override_that_returns_all_three_is_taken_as_it_is(make_engine, batch):
    class Mine(TorchEngine):
        def _build_model_optimizer(self, **arguments):
            module = Small().to(self.device)
            return module, torch.optim.SGD(module.parameters(), lr=arguments["optim_config"].lr), None

    engine = make_engine(cls=Mine, hooks={"engine_wrap_policy": lambda **_: pytest.fail("was asked")})
    before = weights_of(engine)
    step = train(engine, batch)[0][1]
    assert step.lr == engine.config.optim.lr
    assert not same(weights_of(engine), before)


@pytest.mark.parametrize("built", [None, (1, 2), "model"])
def test_an_override_that_returns_something_else_is_told_so(make_engine, built):
    class Mine(TorchEngine):
        def _build_model_optimizer(self, **arguments):
            return built

    with pytest.raises(PluginError, match=r"Mine._build_model_optimizer returned \w+; expected a module, or"):
        make_engine(cls=Mine)


def test_an_override_without_an_optimizer_for_a_trained_role_is_told_so(make_engine):
    class Mine(TorchEngine):
        def _build_model_optimizer(self, **arguments):
            return Small(), None, None

    with pytest.raises(PluginError, match="returned no optimizer for a trained role"):
        make_engine(cls=Mine)
    assert make_engine(cls=Mine, trainable=False, role="ref").optimizer is None


def test_a_live_model_is_trained_itself_and_copied_for_the_reference(make_engine, batch):
    live = {"model": make_engine("llama").module.train()}
    actor, ref = make_engine(live=live), make_engine(live=live, role="ref", trainable=False)
    assert actor.module is live["model"]
    assert not actor.module.training  # no dropout: an unchanged policy has ratio 1
    assert actor.module.config._attn_implementation == "varlen"
    assert ref.module is not live["model"]
    before = weights_of(ref)
    train(actor, batch)
    assert same(weights_of(ref), before)


# -- weights -----------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "qwen3_moe"])
def test_named_weights_are_what_save_pretrained_writes(make_engine, tmp_path, family):
    engine = make_engine(family)
    engine.export(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert same(weights_of(engine), written)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, engine.module.lm_head.weight.cpu())


def test_an_exported_folder_is_a_model_path(make_engine, batch, tmp_path):
    engine = make_engine()
    train(engine, batch)
    engine.export(tmp_path / "out")
    again = make_engine(model={"path": str(tmp_path / "out")})
    assert torch.equal(
        again.infer(batch, ["log_probs"])["log_probs"], engine.infer(batch, ["log_probs"])["log_probs"]
    )


def test_a_module_without_save_pretrained_is_exported_as_its_tensors(make_engine, tmp_path):
    engine = make_engine(hooks={"engine_build_model": lambda **_: Small()})
    engine.export(tmp_path / "out")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), weights_of(engine))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_loaded_weights_are_mixed_as_a_moving_average(make_engine, family):
    engine, other = make_engine(family), make_engine(family, model={"seed": 1})
    before = weights_of(engine)
    engine.load_named_weights(other.named_weights(), mix=0.25)
    for name, value in engine.named_weights():
        torch.testing.assert_close(value.cpu(), 0.75 * before[name] + 0.25 * weights_of(other)[name])
    engine.load_named_weights(other.named_weights())
    assert same(weights_of(engine), weights_of(other))


def test_weights_that_do_not_fit_are_named(make_engine):
    engine = make_engine()
    weights = weights_of(engine)
    some = dict(weights)
    some.pop("model.norm.weight")
    with pytest.raises(DataError, match=r"1 of \d+ weights did not come: model.norm.weight"):
        engine.load_named_weights(some.items())
    with pytest.raises(
        DataError,
        match=r"Unknown weight 'model.norms.weight' for Qwen3ForCausalLM. Did you mean 'model.norm.weight'",
    ):
        engine.load_named_weights([("model.norms.weight", weights["model.norm.weight"])])
    with pytest.raises(DataError, match=r"'model.norm.weight' has shape \[3\]; expected \[32\]"):
        engine.load_named_weights([("model.norm.weight", torch.zeros(3))])


def test_weights_of_experts_that_do_not_fit_are_named(make_engine):
    engine = make_engine("qwen3_moe")
    weights = weights_of(engine)
    weights["model.extra"] = weights.pop("model.norm.weight")
    with pytest.raises(
        DataError, match=r"do not fit Qwen3MoeForCausalLM: missing model.norm.weight; unknown model.extra"
    ):
        engine.load_named_weights(weights.items())


def test_the_generation_module_samples_without_gradients_and_is_given_back_as_it_was(make_engine):
    engine = make_engine()
    engine.module.train()
    prompts = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6]], device=engine.device)
    with engine.generation_module() as module:
        assert not module.training
        assert not torch.is_grad_enabled()
        padded = module.generate(
            prompts, attention_mask=(prompts > 0).long(), max_new_tokens=6, do_sample=False, eos_token_id=None
        )
        alone = module.generate(prompts[:1, 2:], max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(padded[0, 2:], alone[0])
    assert engine.module.training
    assert torch.is_grad_enabled()


# -- state -------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"param_dtype": "bf16"}, {"family": "llama"}, {"family": "qwen3_moe"}]
)
def test_after_a_load_training_goes_on_bit_for_bit(make_engine, batch, batch_of, tmp_path, options):
    optim = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    engine = make_engine(optim=optim, **options)
    train(engine, batch, steps=2)
    engine.save(tmp_path / "state").result(timeout=10)
    noise = torch.rand(3)
    later = batch_of([9, 14])
    expected = train(engine, later, steps=2)

    again = make_engine(optim=optim, model={"seed": 5}, **options)
    again.load(tmp_path / "state")
    assert torch.equal(torch.rand(3), noise)
    assert train(again, later, steps=2) == expected
    assert same(weights_of(again), weights_of(engine))


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.3),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 7),
    "constant": lambda o: torch.optim.lr_scheduler.ConstantLR(o, total_iters=3),
    "in turn": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.3), torch.optim.lr_scheduler.ExponentialLR(o, 0.7)],
        [3],
    ),
    "at steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.3),
    "at steps in turn": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.ConstantLR(o, 1.0),
            torch.optim.lr_scheduler.MultiStepLR(o, [2], gamma=0.3),
        ],
        [4],
    ),
    "factors": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_plugins_scheduler_that_makes_a_rate_from_the_one_before_goes_on_with_it(
    make_engine, batch, tmp_path, kind
):
    def optimizer(role, module, optim_config, options):
        made = torch.optim.AdamW(module.parameters(), lr=optim_config.lr)
        return made, SCHEDULERS[kind](made)

    def make():
        return make_engine(hooks={"engine_build_optimizer": optimizer}, optim={"lr": 1e-4})

    straight = make()
    train(straight, batch, steps=4)
    straight.save(tmp_path / "saved").result()
    resumed = make()
    resumed.load(tmp_path / "saved")
    expected = [step.lr for _, step in train(straight, batch, steps=4)]
    assert len(set(expected)) > 1 or kind == "constant"
    assert [step.lr for _, step in train(resumed, batch, steps=4)] == expected
    assert same(weights_of(resumed), weights_of(straight))


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_resume_takes_the_shares_of_groups_that_the_optimizer_has_now(make_engine, batch, tmp_path, kind):
    def make(share):
        def optimizer(role, module, optim_config, options):
            vectors = [p for p in module.parameters() if p.ndim == 1]
            rest = [p for p in module.parameters() if p.ndim > 1]
            groups = [{"params": rest}, {"params": vectors, "lr": optim_config.lr * share}]
            made = torch.optim.AdamW(groups, lr=optim_config.lr)
            return made, SCHEDULERS[kind](made)

        return make_engine(hooks={"engine_build_optimizer": optimizer}, optim={"lr": 1e-4})

    def rates(engine):
        found = []
        for _ in range(4):
            train(engine, batch)
            found.append([group["lr"] for group in engine.optimizer.param_groups])
        return found

    first = make(0.5)
    train(first, batch, steps=2)
    first.save(tmp_path / "saved").result()
    resumed = make(0.05)
    resumed.load(tmp_path / "saved")
    for (whole, half), (same, changed) in zip(rates(first), rates(resumed), strict=True):
        assert same == whole
        assert half == pytest.approx(0.5 * whole)
        assert changed == pytest.approx(0.05 * whole)


def test_a_saved_state_is_safetensors_and_json_only(make_engine, batch, tmp_path):
    engine = make_engine()
    train(engine, batch)
    engine.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == [
        "optimizer.safetensors",
        "state.json",
        "weights.safetensors",
    ]


def test_a_state_that_does_not_fit_is_refused_with_the_reason(make_engine, batch, tmp_path):
    engine = make_engine()
    train(engine, batch)
    engine.save(tmp_path / "state")
    (tmp_path / "state" / "optimizer.safetensors").unlink()
    with pytest.raises(DataError, match=r"optimizer.safetensors is missing: this is not a whole checkpoint"):
        make_engine().load(tmp_path / "state")
    make_engine(role="ref", trainable=False).save(tmp_path / "ref")
    with pytest.raises(DataError, match="holds no optimizer: it was written by a role that is not trained"):
        make_engine().load(tmp_path / "ref")


def test_an_optimizer_over_other_parameters_is_refused(make_engine, batch, tmp_path):
    engine = make_engine()
    engine.module.model.norm.weight.requires_grad_(False)
    frozen = make_engine(live={"model": engine.module})
    train(frozen, batch)
    frozen.save(tmp_path / "state")
    with pytest.raises(DataError, match=r"over other parameters than this one's: model.norm.weight"):
        make_engine().load(tmp_path / "state")


# -- memory ------------------------------------------------------------------


def test_asleep_it_refuses_work_and_awake_it_goes_on(make_engine, batch):
    engine, other = make_engine(), make_engine()
    for one in (engine, other):
        train(one, batch)
    engine.sleep()
    assert engine.module.model.norm.weight.grad is None
    with pytest.raises(RuntimeError, match=r"role 'actor' is asleep \(weights\): wake it first"):
        engine.infer(batch, ["log_probs"])
    engine.wake(only=["weights"])
    engine.infer(batch, ["log_probs"])
    with pytest.raises(RuntimeError, match=r"asleep \(gradients, optimizer\)"):
        engine.optimizer_step()
    engine.wake()
    assert train(engine, batch) == train(other, batch)


def test_an_unknown_part_is_named(make_engine):
    with pytest.raises(ValueError, match=r"Unknown part 'weight' of a train engine. Did you mean 'weights'"):
        make_engine().sleep(keep=["weight"])


def test_deterministic_turns_torchs_switch_on(make_engine):
    engine = make_engine()
    try:
        type(engine)(
            engine.config, engine.model_config, dataclasses.replace(engine.context, deterministic=True)
        )
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
