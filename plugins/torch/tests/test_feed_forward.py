"""Feed-forwards in chunks: the numbers of the whole, and no more than a chunk of wide activations."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config, LlamaConfig, Qwen3MoeConfig

from engine_core.errors import ConfigError
from engine_core.types import LossCall
from engine_plugin_torch.feed_forward import chunk_feed_forwards, feed_forwards

NLL = LossCall("nll")
WIDE = 48  # of a feed-forward in these models
SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": WIDE,
    "num_hidden_layers": 2,
    "head_dim": 8,
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, **HEADS, mlp_bias=True),
    "gpt2": GPT2Config(vocab_size=61, n_embd=16, n_inner=WIDE, n_layer=2, n_head=2, n_positions=64),
}
MIXTURE = Qwen3MoeConfig(**SMALL, **HEADS, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)


def model(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).double().eval()


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_give_the_outputs_and_gradients_of_the_whole_in_float64(family, chunk):
    ids = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    outputs, gradients = [], []
    for size in (0, chunk):
        module = model(CONFIGS[family])
        assert len(chunk_feed_forwards(module, size, "key")) == (2 if size else 0)
        logits = module(input_ids=ids, use_cache=False).logits
        logits.square().sum().backward()
        outputs.append(logits.detach())
        gradients.append({name: p.grad for name, p in module.named_parameters()})
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-13)
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-9, atol=1e-11)


def gradients(engine):
    return {n: p.grad.cpu().clone() for n, p in engine.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"activation_checkpointing": True, "compile": True, "lora": {"rank": 4}}, marks=pytest.mark.slow)],
    ids=lambda more: "-".join(more) or "plain",
)  # fmt: skip
def test_an_engine_learns_the_same_in_chunks(make_engine, batch, monkeypatch, more):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    lora = {"lora": more["lora"]} if "lora" in more else {}
    plain, chunked = make_engine(**lora), make_engine(sequence_chunk_tokens=5, **more)
    expected, found = plain.forward_backward(batch, NLL), chunked.forward_backward(batch, NLL)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert gradients(chunked).keys() == gradients(plain).keys()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(chunked)[name], gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        chunked.infer(batch, ["log_probs"]), plain.infer(batch, ["log_probs"]), rtol=1e-5, atol=1e-6
    )
    if "compile" in more:  # none fell back
        layer = chunked.module.get_decoder().layers[0]
        run = layer.mlp.forward.args[0]
        assert run.compiled is not None


class Widest(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the most rows of any tensor as wide as a feed-forward."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == WIDE:
                weight = tuple(tensor.shape) == (32, WIDE)
                self.rows = self.rows if weight else max(self.rows, tensor.numel() // WIDE)
        return out


@pytest.mark.parametrize("again", [False, True])
def test_a_chunk_of_wide_activations_exists_at_a_time_in_the_backward_pass_too(make_engine, batch_of, again):
    batch = batch_of([60] * 5)
    engine = make_engine(sequence_chunk_tokens=40, activation_checkpointing=again)
    engine.infer(batch_of([4]), ["log_probs"])  # the trial on a few tokens
    with Widest() as watch:
        engine.infer(batch, ["log_probs"])
        engine.forward_backward(batch, NLL)
    assert watch.rows == 40


def test_what_is_kept_for_the_backward_pass_has_no_wide_activations(make_engine, batch_of):
    batch, kept = batch_of([60] * 5), []
    engine = make_engine(sequence_chunk_tokens=40)
    engine.infer(batch_of([4]), ["log_probs"])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        engine.forward_backward(batch, NLL)
    assert any(shape[-1] == 32 for shape in kept if shape)
    assert not [shape for shape in kept if shape and shape[-1] == WIDE and shape[0] != 32]


def test_a_mixture_of_experts_and_layers_where_tokens_meet_are_left_alone():
    class MixingMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.across = nn.Conv1d(4, 4, 3)

        def forward(self, hidden):
            return self.across(hidden)

    assert feed_forwards(MixingMLP()) == []
    assert feed_forwards(AutoModelForCausalLM.from_config(MIXTURE)) == []
    some = DeepseekV3Config(**SMALL, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=2,
                            num_experts_per_tok=1, n_group=1, topk_group=1, first_k_dense_replace=1,
                            moe_intermediate_size=8, q_lora_rank=4, kv_lora_rank=4)  # fmt: skip
    assert feed_forwards(AutoModelForCausalLM.from_config(some)) == [
        "model.layers.0.mlp",
        "model.layers.1.mlp.shared_experts",  # every token goes through it
    ]


def test_a_model_without_such_a_feed_forward_is_refused_by_key(make_engine):
    with pytest.raises(ConfigError, match=r"actor.torch.sequence_chunk_tokens: Qwen3MoeForCausalLM has no"):
        make_engine("qwen3_moe", sequence_chunk_tokens=8)
