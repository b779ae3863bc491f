"""Architectures come from a table that other plugins add to; what none computes is refused by name."""

import textwrap

import pytest
import torch
from transformers import (
    GemmaConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    SeedOssConfig,
)

from engine_core.errors import ConfigError, PluginError
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_megatron.models.architecture import Architecture, Qwen2, architecture_of


def test_a_model_type_is_its_name():
    assert type(architecture_of(LlamaConfig())) is Architecture
    assert type(architecture_of(Qwen2Config())) is Qwen2


def test_one_that_nobody_offers_is_refused_with_what_is_there():
    config = GemmaConfig()
    config.model_type = "qwen4"
    with pytest.raises(ConfigError) as error:
        architecture_of(config)
    for word in (
        "Megatron has no model for GemmaConfig",
        "Unknown architecture 'qwen4'. Did you mean 'qwen",
        "Known: gemma, llama,",
        "Use backend 'fsdp'",
        "engine_architectures",
    ):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LlamaConfig(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (LlamaConfig(attention_bias=True), "attention_bias is true"),
        (LlamaConfig(mlp_bias=True), "mlp_bias is true"),
        (
            Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=2),
            "sliding_window is 64",
        ),
        (
            LlamaConfig(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
            "rope_type is 'yarn'",
        ),
        (
            LlamaConfig(
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            ),
            "partial_rotary_factor",
        ),
        (Qwen3MoeConfig(num_experts_per_tok=1, norm_topk_prob=True), "the router would have no gradient"),
        (MixtralConfig(num_experts_per_tok=1), "the router would have no gradient"),
        (SeedOssConfig(attention_bias=False), "attention_bias is false"),
        (SeedOssConfig(attention_out_bias=True), "attention_out_bias is true"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(config, words):
    with pytest.raises(ConfigError, match=words):
        architecture_of(config)


def test_another_plugin_adds_one(tmp_path):
    file = tmp_path / "ministral.py"
    file.write_text(
        textwrap.dedent(
            """
            from engine_core import hookimpl
            from engine_plugin_megatron.tables import ModelArchitecture


            def ministral():
                from engine_plugin_megatron.models.architecture import Architecture

                return Architecture()


            @hookimpl
            def engine_architectures():
                return {"ministral": ModelArchitecture(load=ministral)}
            """
        )
    )
    run = PluginSet.load({}, ["ministral.py"], tmp_path)
    assert type(architecture_of(MinistralConfig(layer_types=["full_attention"] * 32), run)) is Architecture
    with pytest.raises(ConfigError, match="sliding_window is 4096"):
        architecture_of(MistralConfig())


def test_one_that_does_not_load_is_told_as_it_is(tmp_path):
    (tmp_path / "again.py").write_text(
        "from engine_core import hookimpl\nfrom engine_plugin_megatron.tables import ModelArchitecture\n\n\n@hookimpl\n"
        "def engine_architectures():\n    return {'llama': ModelArchitecture(load='math:sqrt')}\n"
    )
    run = PluginSet.load({}, ["again.py"], tmp_path)
    with pytest.raises(PluginError, match="'llama' is offered by"):
        architecture_of(LlamaConfig(), run)


def test_frequencies_of_plain_rotary_positions():
    """theta^(-2i / d): for theta 10,000 and d 4 they are 1 and 1/100."""
    hf = LlamaConfig(head_dim=4)
    assert torch.allclose(Architecture().inverse_frequencies(hf), torch.tensor([1.0, 0.01]))
