"""Estimates of memory against what real models hold and what autograd really keeps."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import Glm4MoeConfig, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from engine_core.types import LossCall
from engine_plugin_torch import memory, packed_forward
from engine_plugin_torch.budget import MemoryBudget
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.memory import (
    Activations,
    Decoder,
    Estimate,
    Held,
    Settings,
    activations,
    optimizer_bytes,
)

CPU = torch.device("cpu")
NLL = LossCall("nll")
WITHIN = 0.04  # of what is really kept
SHAPE = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, head_dim=24),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=24, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=101, n_embd=64, n_inner=160, n_layer=3, n_head=4),
}
TYPES = [("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16")]
LENGTHS = [60] * 6  # of one length: rectangles without padding


@pytest.fixture(autouse=True)
def logits_of_any_size_are_computed_again(monkeypatch):
    """As those of a real vocabulary are."""
    monkeypatch.setattr(packed_forward, "KEPT_BYTES", 0)


class Kept:
    """Bytes that autograd keeps in a context, each storage once, without the weights of a module."""

    def __init__(self, module):
        self.bytes, self.held = 0, []
        self.seen = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen:
            self.seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
            self.held.append(tensor)  # so that its place is not given to another
        return tensor

    def __enter__(self):
        self.hooks.__enter__()
        return self

    def __exit__(self, *found):
        self.hooks.__exit__(*found)


@pytest.fixture
def engine_of(make_engine, tmp_path):
    def make(family, **options):
        CONFIGS[family].save_pretrained(tmp_path / family)
        return make_engine(model={"path": str(tmp_path / family)}, budget=100_000, **options)

    return make


@pytest.mark.parametrize(("param", "compute"), TYPES)
@pytest.mark.parametrize("family", CONFIGS)
def test_what_a_token_keeps_is_counted(engine_of, batch_of, family, param, compute):
    engine = engine_of(family, param_dtype=param, compute_dtype=compute)
    batch = batch_of(LENGTHS)
    engine.forward(batch, ("log_probs",))  # the trial on a few tokens
    with Kept(engine.module) as kept:
        found = engine.forward(batch, ("log_probs",))
    assert found["log_probs"].requires_grad
    act = activations(Decoder.of(engine.module), engine.budget.settings)
    expected = act.token(False) * batch.num_tokens + act.copies
    assert kept.bytes == pytest.approx(expected, rel=WITHIN)


@pytest.mark.parametrize(("param", "compute"), [("fp32", "fp32"), ("bf16", "bf16")])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_a_token_keeps_below_an_adapter_is_counted(engine_of, batch_of, family, param, compute):
    engine = engine_of(family, param_dtype=param, compute_dtype=compute, lora={"rank": 4})
    batch = batch_of(LENGTHS)
    engine.forward(batch, ("log_probs",))
    with Kept(engine.module) as kept:
        engine.forward(batch, ("log_probs",))
    act = activations(Decoder.of(engine.module), engine.budget.settings)
    assert kept.bytes == pytest.approx(act.token(False) * batch.num_tokens, rel=WITHIN)


@pytest.mark.parametrize("family", CONFIGS)
def test_with_checkpointing_a_layer_keeps_its_input_and_one_at_a_time_the_rest(engine_of, batch_of, family):
    engine = engine_of(family, activation_checkpointing=True)
    batch = batch_of(LENGTHS)
    engine.forward(batch, ("log_probs",))
    act = activations(Decoder.of(engine.module), engine.budget.settings)
    with Kept(engine.module) as kept:
        engine.forward(batch, ("log_probs",))
    carried = act.token(True) - act.layer
    assert kept.bytes == pytest.approx(carried * batch.num_tokens, rel=WITHIN)
    assert act.layer > 5 * act.carried


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
@pytest.mark.parametrize("family", CONFIGS)
def test_weights_gradients_and_optimizer_are_counted_to_the_byte(engine_of, batch_of, family, lora):
    engine = engine_of(family, lora=lora)
    held = Held.of(engine.module, trained=True)
    engine.forward_backward(batch_of(LENGTHS), NLL)
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    assert held.gradients == sum(g.numel() * g.itemsize for g in gradients)
    assert held.weights == sum(p.numel() * p.itemsize for p in engine.module.parameters())
    engine.optimizer_step()
    counts = 4 * len(gradients)  # Adam's number of steps, one float32 a tensor
    assert optimizer_bytes(engine.optimizer, CPU) == held.optimizer + counts


def test_the_figures_of_an_h200_are_met():
    """benchmarks/train/README.md: Qwen3-0.6B in bf16, 49,152 tokens a micro-batch; peaks as measured there."""
    shape = Decoder(
        hidden=1024, wide=3072, layers=28, queries=2048, keys=1024, heads=16, vocabulary=151936,
        gated=True, rms=True, normed=True, in_steps=False, reads=5,
    )  # fmt: skip
    half, held = torch.bfloat16, 596_049_920 * 8 / memory.GIB  # weights, gradients, two of Adam

    def peak(checkpointing=False, **how):
        act = activations(shape, Settings(param=half, compute=half, kernel=True, **how))
        return held + (act.token(checkpointing) * 49152 + act.chunks) / memory.GIB

    assert peak(compiled=False) == pytest.approx(105, rel=0.06)
    assert peak(compiled=True) == pytest.approx(69, rel=0.06)


class Free(MemoryBudget):
    """The budget of a device that has so many bytes."""

    free = 0

    def free_bytes(self):
        return self.free


class With(TorchEngine):
    budget_class = Free


def test_auto_takes_as_many_tokens_as_fit_and_says_so(make_engine, batch_of, caplog):
    need = estimate_of(make_engine("qwen3"))
    Free.free = int((need.activations.chunks + 3000 * need.activations.token(False)) / (1 - memory.RESERVE))
    Free.free += need.held.gradients + need.held.optimizer
    engine = make_engine("qwen3", budget="auto", activation_checkpointing=False, cls=With)
    with caplog.at_level(logging.INFO, logger="engine"):
        output = engine.forward_backward(batch_of([50] * 100), NLL)
    assert engine.config.max_tokens_per_rank == 2560  # 3000, a multiple of 512
    assert output.num_micro_batches == 2
    assert "actor: max_tokens_per_rank = 2560" in caplog.text
    assert "a token, recomputed" in caplog.text
    Free.free = 0
    assert engine.forward_backward(batch_of([50] * 100), NLL).num_micro_batches == 2  # settled


def test_auto_counts_what_the_role_holds_already_once(make_engine, batch_of):
    Free.free = 50 * 2**20
    new = make_engine("qwen3", budget="auto", activation_checkpointing=False, cls=With)
    before = new.budget.tokens
    new.close()
    trained = make_engine("qwen3", budget=1000, activation_checkpointing=False, cls=With)
    trained.forward_backward(batch_of([20]), NLL)
    trained.optimizer_step()
    trained.set_token_budget("auto")
    taken = optimizer_bytes(trained.optimizer, CPU)
    Free.free = 50 * 2**20 - taken  # the optimizer's state has come from the free bytes
    assert abs(trained.budget.tokens - before) <= memory.ROUND


def test_auto_leaves_room_for_what_other_roles_have_still_to_allocate(make_engine):
    Free.free = 50 * 2**20
    alone = make_engine("qwen3", budget="auto", activation_checkpointing=False, cls=With)
    need, most = estimate_of(alone), alone.budget.tokens
    alone.close()
    critic = make_engine("qwen3", budget=1000, cls=With, role="critic")
    owed = critic.budget.held().total - critic.budget.held().weights
    actor = make_engine("qwen3", budget="auto", activation_checkpointing=False, cls=With)
    taken = owed * (1 - memory.RESERVE) / need.activations.token(False)
    assert most - actor.budget.tokens == pytest.approx(taken, abs=memory.ROUND)


def test_a_resumed_run_has_the_token_budget_that_it_had(make_engine, tmp_path):
    Free.free = 30 * 2**20
    first = make_engine("qwen3", budget="auto", activation_checkpointing=False, cls=With)
    tokens = first.budget.tokens
    first.save(tmp_path)
    first.close()
    for free, expected in ((60, tokens), (20, None)):
        Free.free = free * 2**20
        again = make_engine("qwen3", budget="auto", activation_checkpointing=False, cls=With)
        again.load(tmp_path)
        assert again.budget.tokens == expected if expected else again.budget.tokens < tokens
        again.close()


def test_activations_are_recomputed_where_the_tokens_would_else_not_fit(make_engine, batch_of):
    need = estimate_of(make_engine("qwen3"))
    for tokens, expected in ((4000, False), (2000, True)):
        Free.free = int(
            (need.activations.chunks + 3000 * need.activations.token(False)) / (1 - memory.RESERVE)
        )
        Free.free += need.held.gradients + need.held.optimizer
        budget = {4000: 2000, 2000: 4000}[tokens]
        engine = make_engine("qwen3", budget=budget, activation_checkpointing="auto", cls=With)
        engine.infer(batch_of([50]), ["log_probs"])  # the first use tries more
        count = calls_of(engine.module.get_decoder().layers[0].self_attn)
        engine.forward_backward(batch_of([50]), NLL)
        assert len(count) == 1 + expected  # once more in the backward pass


def test_where_nothing_is_known_the_choice_is_fixed(make_engine, batch_of, caplog):
    with caplog.at_level(logging.INFO, logger="engine"):
        cpu = make_engine("qwen3", budget="auto", activation_checkpointing="auto")
        assert cpu.budget.tokens == 8192
    cpu.infer(batch_of([50]), ["log_probs"])
    count = calls_of(cpu.module.get_decoder().layers[0].self_attn)
    cpu.forward_backward(batch_of([50]), NLL)
    assert len(count) == 1
    assert "max_tokens_per_rank = 8192, activations are kept; there is no estimate of memory" in caplog.text
    Free.free = 2**30
    assert (
        make_engine("qwen3_moe", budget="auto", activation_checkpointing=False, cls=With).budget.tokens
        == 8192
    )  # a mixture of experts


def test_a_budget_of_a_model_that_is_not_trained_needs_no_kept_activations(make_engine):
    Free.free = 8 * 2**20
    trained = make_engine("qwen3", budget="auto", activation_checkpointing=False, cls=With).budget.tokens
    frozen = make_engine(
        "qwen3", budget="auto", activation_checkpointing=False, cls=With, trainable=False, role="ref"
    ).budget.tokens
    assert frozen > 2 * trained


def test_a_backend_without_activation_checkpointing_has_auto_tokens(make_engine):
    engine = make_engine("qwen3", budget="auto")
    without = {name: value for name, value in engine.options if name != "activation_checkpointing"}
    engine.options = SimpleNamespace(**without)
    assert engine.budget.tokens == 8192


def test_a_schedule_may_go_back_to_auto(make_engine):
    engine = make_engine("qwen3", budget=100)
    engine.set_token_budget("auto")
    assert engine.budget.tokens == 8192


def test_a_token_of_a_model_with_some_recomputed_layers_lies_between():
    act = Activations(layer=100, carried=10, layers=4, ends=7, chunks=0, copies=0, passing=1)
    assert (act.token(0), act.token(1)) == (407, 147)
    assert act.token(0.5) == 2 * 100 + 2 * 10 + 100 + 7  # two of four, and the one that is computed again


def calls_of(module):
    """A list that grows with each forward pass of ``module``."""
    seen, forward = [], module.forward

    def counted(*args, **kwargs):
        seen.append(1)
        return forward(*args, **kwargs)

    module.forward = counted
    return seen


def estimate_of(engine):
    """Of an engine, with a settled amount of memory."""
    act = activations(Decoder.of(engine.module), engine.budget.settings)
    return Estimate(Held.of(engine.module, True), act, 0)


def test_a_model_that_is_not_dense_has_no_shape():
    for config, dense in ((CONFIGS["qwen3"], True), (Glm4MoeConfig(**SHAPE), False)):
        module = torch.nn.Module()
        module.config = config
        assert (Decoder.of(module) is not None) == dense
