"""Which models may be packed and taken apart, and what happens to the others."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DogeConfig,
    HunYuanDenseV1Config,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    NanoChatConfig,
    NemotronConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
)
from transformers.modeling_outputs import CausalLMOutput

from engine_core.errors import ConfigError
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
    assert (
        "full logits, which need more memory: its logits are not those that its config describes"
        in caplog.text
    )
    assert engine.forward.packs
    halved = batch.with_columns({})
    halved.temperature = 0.5
    torch.testing.assert_close(found, make_engine("llama").infer(halved, ["log_probs"])["log_probs"])
    assert not torch.allclose(found, expected)


class Scaled(LlamaForCausalLM):
    """A model whose logits have a scale, which begins at 1, and that has a parameter for something else."""

    def __init__(self, config):
        super().__init__(config)
        self.gain, self.other = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(3))

    def forward(self, input_ids=None, position_ids=None, use_cache=None, **others):
        output = super().forward(input_ids, position_ids=position_ids, use_cache=use_cache, **others)
        output.logits = output.logits * self.gain
        return output


@pytest.mark.parametrize("used", [True, False])
def test_a_parameter_behind_the_head_that_begins_as_the_identity_is_trained(
    make_engine, batch, model_folder, caplog, used
):
    kind = Scaled if used else type("Unscaled", (Scaled,), {"forward": LlamaForCausalLM.forward})
    engine = make_engine("llama", live={"model": kind(AutoConfig.from_pretrained(model_folder("llama")))})
    with caplog.at_level(logging.WARNING, "engine"):
        engine.forward_backward(batch, LossCall("nll"))
    assert ("its logits also depend on 'gain' outside decoder and head" in caplog.text) == used
    assert (engine.forward.head is None) == used
    assert (engine.module.gain.grad is not None and bool(engine.module.gain.grad != 0)) == used
    assert engine.module.model.norm.weight.grad.any()


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


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


@pytest.fixture
def engine_of(make_engine, tmp_path):
    """Builds an engine over random weights of a config: ``engine_of(config, **model)``."""

    def build(config, **model):
        config.save_pretrained(tmp_path / config.model_type)
        return make_engine(model={"path": str(tmp_path / config.model_type), **model})

    return build


def test_frequencies_of_longrope_are_those_of_each_sequence_alone(engine_of, batch_of):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(**SHAPE, original_max_position_embeddings=16, rope_parameters={**rope, **factors})
    engine = engine_of(config)
    batch = batch_of([10, 30])
    found = engine.infer(batch, ["log_probs"])["log_probs"]
    for ids, log_probs in zip(batch.token_ids.split([10, 30]), found.split([10, 30]), strict=True):
        with torch.no_grad():
            logits = engine.module(ids[None]).logits[0, :-1].double()
        expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(log_probs[2:].double(), expected[1:], rtol=1e-5, atol=1e-5)


def test_a_token_does_not_see_an_earlier_chunk(engine_of, batch_of):
    shape = {**SHAPE, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 1}
    engine = engine_of(Llama4TextConfig(**shape, attention_chunk_size=4, no_rope_layers=[1, 1]))
    assert set(engine.module.config.layer_types) == {"chunked_attention"}
    batch, other = batch_of([12]), batch_of([12])
    other.token_ids[:4] = other.token_ids[:4] % 96 + 1  # the first chunk
    one, two = (engine.infer(each, ["log_probs"])["log_probs"] for each in (batch, other))
    assert torch.equal(one[5:], two[5:])
    assert not torch.equal(one[:4], two[:4])


@torch.no_grad()
def log_probs_of(module, ids):
    """Log-probs of the tokens after the first two, computed with an explicit mask."""
    own = AutoModelForCausalLM.from_config(module.config, attn_implementation="eager").eval()
    own.load_state_dict(module.state_dict())
    log_probs = own(ids[None]).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, ids[1:, None])[1:, 0]


EXPERTS = {"num_experts_per_tok": 2, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "packs"),
    [
        (MistralConfig(**SHAPE, head_dim=8, sliding_window=6), True),
        (PhimoeConfig(**SHAPE, **EXPERTS, num_local_experts=4, sliding_window=6), False),
        (
            Qwen2MoeConfig(
                **SHAPE,
                **EXPERTS,
                num_experts=4,
                sliding_window=6,
                use_sliding_window=True,
                max_window_layers=1,
            ),
            False,
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_model_that_has_its_window_in_the_mask_alone_is_not_packed(
    engine_of, batch_of, caplog, config, packs
):
    with caplog.at_level(logging.WARNING, "engine"):
        engine = engine_of(config)
        batch = batch_of([20, 12])
        found = engine.infer(batch, ["log_probs"])["log_probs"]
    assert engine.module.config._attn_implementation == "varlen"
    assert engine.forward.packs == packs
    assert ("applies its sliding window in the attention mask alone" in caplog.text) != packs
    for ids, log_probs in zip(batch.token_ids.split([20, 12]), found.split([20, 12]), strict=True):
        torch.testing.assert_close(log_probs[2:], log_probs_of(engine.module, ids), rtol=1e-4, atol=1e-4)


def test_a_model_that_fails_on_a_pack_runs_one_sequence_at_a_time(engine_of, batch_of, caplog):
    """The attention of Nemotron does not pass the boundaries of sequences on, and gets an empty mask."""
    with caplog.at_level(logging.WARNING, "engine"):
        engine = engine_of(NemotronConfig(**SHAPE, head_dim=8, bos_token_id=None))
        batch = batch_of([20, 12])
        found = engine.infer(batch, ["log_probs"])["log_probs"]
    assert engine.module.config._attn_implementation == "varlen"
    assert "does not compute packed sequences (RuntimeError: " in caplog.text
    assert engine.forward.head is not None
    assert engine.forward_backward(batch, LossCall("nll")).loss > 0
    for ids, log_probs in zip(batch.token_ids.split([20, 12]), found.split([20, 12]), strict=True):
        torch.testing.assert_close(log_probs[2:], log_probs_of(engine.module, ids))


def test_a_model_whose_tokens_see_later_ones_is_refused(engine_of, batch_of):
    """Doge adds the causal mask to its own one, and transformers gives ``sdpa`` and ``varlen`` no causal mask."""
    config, batch = DogeConfig(**SHAPE, bos_token_id=None), batch_of([20, 12])
    for attention in ("auto", "sdpa"):
        engine = engine_of(config, attention=attention)
        with pytest.raises(ConfigError, match=r"is not causal.*Set model.attention = 'eager'"):
            engine.infer(batch, ["log_probs"])
    engine = engine_of(config, attention="eager")
    found = engine.infer(batch, ["log_probs"])["log_probs"]
    assert engine.forward.packs
    for ids, log_probs in zip(batch.token_ids.split([20, 12]), found.split([20, 12]), strict=True):
        torch.testing.assert_close(log_probs[2:], log_probs_of(engine.module, ids))


def test_frequencies_that_depend_on_earlier_sequences_are_refused(engine_of, batch_of):
    config = LlamaConfig(
        **SHAPE,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    )
    with pytest.raises(
        ConfigError,
        match=r"rope_type is 'dynamic'.* Up to 16 tokens it equals 'default': set model\.override\.rope_type = 'default'",
    ):
        engine_of(config)
    engine, batch = engine_of(config, override={"rope_type": "default"}), batch_of([16])
    own = AutoModelForCausalLM.from_config(config)
    own.load_state_dict(engine.module.state_dict())
    with torch.no_grad():
        logits = own(batch.token_ids[None]).logits[0, :-1].log_softmax(-1)
    found = engine.infer(batch, ["log_probs"])["log_probs"]
    torch.testing.assert_close(found[2:], logits.gather(1, batch.token_ids[1:, None])[1:, 0])


def test_dynamic_frequencies_that_alpha_fixes_are_those_of_a_pack(engine_of):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
    assert engine_of(HunYuanDenseV1Config(**SHAPE, head_dim=8, rope_parameters=rope)).forward.packs


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
