"""Which models may be packed and taken apart, and what happens to the others."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MambaConfig,
    NanoChatConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

from engine_core.types import Batch, LossCall
from engine_plugin_torch import packed_forward
from engine_plugin_torch.log_probs import find_head
from engine_plugin_torch.packed_forward import PackedForward


def test_a_head_with_unknown_scaling_falls_back_to_the_models_own_logits(make_engine, batch, caplog):
    engine = make_engine("llama")
    expected = make_engine("llama").infer(batch, ["log_probs"])["log_probs"]
    own = type(engine.module).forward

    def doubled(self, *args, **kwargs):
        output = own(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    engine.module.forward = doubled.__get__(engine.module)
    with caplog.at_level(logging.WARNING, "engine"):
        found = engine.infer(batch, ["log_probs"])["log_probs"]
    assert "full logits, which need more memory: its config does not describe its head" in caplog.text
    assert engine.forward.packs
    halved = batch.with_columns({})
    halved.temperature = 0.5
    torch.testing.assert_close(found, make_engine("llama").infer(halved, ["log_probs"])["log_probs"])
    assert not torch.allclose(found, expected)


class Unsplit(PreTrainedModel):
    """A model that names ``use_cache``, but is not split into a base model and a head."""

    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.words, self.head = torch.nn.Embedding(97, 8), torch.nn.Linear(8, 97)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, position_ids=None, use_cache=None, **others):
        return CausalLMOutput(logits=self.head(self.words(input_ids)))


def test_a_transformers_class_that_is_not_split_is_trained_with_its_own_logits(make_engine, batch, caplog):
    module = Unsplit(LlamaConfig(vocab_size=97, hidden_size=8, num_attention_heads=1))
    engine = make_engine("llama", live={"model": module})
    with caplog.at_level(logging.WARNING, "engine"):
        found = engine.infer(batch, ["log_probs"])["log_probs"]
    assert "Unsplit: full logits, which need more memory: get_decoder() returns no base model" in caplog.text
    logits = module(batch.token_ids[None]).logits[0].double().log_softmax(-1)
    expected = logits[:-1].gather(1, batch.token_ids[1:, None])[:, 0]
    kept = found[1:] != 0
    assert kept.any()
    torch.testing.assert_close(found[1:][kept].double(), expected[kept], rtol=1e-5, atol=1e-5)


def test_a_config_key_that_speaks_of_logits_and_is_not_known_gives_full_logits():
    config = NanoChatConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    config.final_logit_multiplier = 3.0
    module = torch.nn.Module()
    module.config, module.get_output_embeddings = config, lambda: torch.nn.Linear(2, 3)
    assert find_head(module) is None


def test_a_model_that_mixes_packed_sequences_gets_one_at_a_time(make_engine, batch, caplog):
    engine = make_engine("llama")
    right = engine.infer(batch, ["log_probs"])["log_probs"]
    engine.forward = PackedForward(engine.module, engine.device, torch.float32, 64)
    decoder = engine.module.get_decoder()
    own = decoder.forward
    decoder.forward = lambda input_ids, position_ids, use_cache, **_: own(
        input_ids=input_ids,
        position_ids=torch.arange(input_ids.shape[1], device=input_ids.device)[None],
        use_cache=use_cache,
    )
    with caplog.at_level(logging.WARNING, "engine"):
        found = engine.infer(batch, ["log_probs"])["log_probs"]
    assert "LlamaForCausalLM mixes packed sequences: one sequence at a time, which is slower" in caplog.text
    torch.testing.assert_close(found, right)


def test_a_recurrent_model_is_never_packed(make_engine, batch, tmp_path):
    MambaConfig(
        vocab_size=97,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=2,
        initializer_range=0.2,
        pad_token_id=0,
    ).save_pretrained(tmp_path / "mamba")
    engine = make_engine(model={"path": str(tmp_path / "mamba"), "attention": "eager"})
    assert not engine.forward.packs
    whole = engine.infer(batch, ["log_probs"])["log_probs"]
    for index, start in enumerate(batch.offsets[:-1].tolist()):
        alone = batch.select([index])
        found = engine.infer(alone, ["log_probs"])["log_probs"]
        torch.testing.assert_close(found, whole[start : start + len(found)])
    assert engine.forward_backward(batch, LossCall("nll")).loss > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_transformers_own_attention_gives_the_same_log_probs(make_engine, batch, attention):
    found = make_engine(model={"attention": attention}).infer(batch, ["log_probs"])["log_probs"]
    torch.testing.assert_close(
        found, make_engine().infer(batch, ["log_probs"])["log_probs"], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("weights", "computed", "cast_to"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32, None),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.bfloat16, torch.float32, None),  # gathered in half precision by a sharded engine
    ],
)
def test_a_forward_pass_is_cast_downwards_only(make_engine, weights, computed, cast_to):
    engine = make_engine("llama")
    forward = PackedForward(engine.module.to(weights), torch.device("cuda"), computed, 8)
    context = forward.autocast()  # is entered nowhere: on CUDA, autocast to float32 is possible
    assert getattr(context, "fast_dtype", None) == cast_to


def test_rounding_that_depends_on_the_kernel_is_not_taken_for_a_leak(make_engine, caplog):
    """On a GPU, a model of 8B in bfloat16 gives logits that are several percent apart by shape and kernel."""
    module = make_engine("llama").module

    def rounded(_, inputs, output):
        hidden = output.last_hidden_state
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(hidden.shape[1]))
        output.last_hidden_state = hidden + 0.08 * hidden.pow(2).mean().sqrt() * noise

    module.get_decoder().register_forward_hook(rounded)
    forward = PackedForward(module, torch.device("cpu"), torch.float32, 64)
    forward.settle()
    assert forward.packs
    assert forward.head is not None
    assert "full logits" not in caplog.text


def test_a_leak_as_small_as_that_rounding_is_found(make_engine):
    module = make_engine("llama").module

    def leaking(_, inputs, output):
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden + 0.08 * hidden[:, :1]

    module.get_decoder().register_forward_hook(leaking)
    forward = PackedForward(module, torch.device("cpu"), torch.float32, 64)
    forward.settle()
    assert not forward.packs


@pytest.mark.parametrize(
    ("recompute", "kept_bytes", "times"), [(False, 0, 1), (True, 4 * 97 * 5, 1), (True, 4 * 97 * 5 - 1, 2)]
)
def test_logits_are_kept_for_the_backward_pass_or_computed_again(
    model_folder, monkeypatch, recompute, kept_bytes, times
):
    monkeypatch.setattr(packed_forward, "KEPT_BYTES", kept_bytes)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder("qwen3"))).eval()
    batch = Batch(torch.arange(1, 9), torch.tensor([8]), {"loss_mask": torch.arange(8) > 2}, {})
    forward = PackedForward(model, torch.device("cpu"), torch.float32, chunk=8, recompute=recompute)
    forward.settle()
    calls = []
    model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    forward(batch, ("log_probs",))["log_probs"].sum().backward()
    assert model.config.vocab_size == 97  # of which the limit above is made, for five targets
    assert len(calls) == times
