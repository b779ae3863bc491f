"""What `[model] attention = "auto"` makes of model and device."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import (
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from engine_core.errors import ConfigError
from engine_plugin_torch import attention
from engine_plugin_torch.attention import choose_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class OwnConfig(PretrainedConfig):
    model_type = "nobody_knows_it"


@pytest.fixture
def capability(monkeypatch):
    """Sets what the CUDA device that is not here can do."""
    return lambda *pair: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: pair)


@pytest.mark.parametrize(
    ("config", "expected", "why"),
    [
        (Qwen3Config(), "varlen", "rectangles"),
        (LlamaConfig(), "varlen", "rectangles"),
        (GPT2Config(), "varlen", "rectangles"),
        (Gemma2Config(), "varlen", "rectangles"),
        (Qwen3NextConfig(), "sdpa", "recurrent layers"),
        (FalconConfig(), "sdpa", "custom attention code"),
        (GptOssConfig(), "eager", "no fused attention"),
        (BloomConfig(), "eager", "no fused attention"),
        (MambaConfig(), "eager", "no fused attention"),
        (OwnConfig(), "sdpa", "not known"),
        (Llama4TextConfig(), "sdpa", "attention in chunks"),
        (
            Phi3Config(
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 16,
                }
                | {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
            ),
            "sdpa",
            "longrope",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_auto_takes_the_quickest_that_is_right_for_the_model(config, expected, why):
    name, reason = choose_attention("auto", config, CPU)
    assert name == expected
    assert why in reason


def test_auto_takes_the_packed_kernel_on_cuda_where_it_runs(capability):
    capability(9, 0)
    assert choose_attention("auto", Qwen3Config(), CUDA)[0] == "varlen"
    name, why = choose_attention("auto", Qwen3Config(head_dim=512), CUDA)
    assert (name, why) == ("sdpa", "torch's kernel for packed sequences has heads up to 256, not 512")
    capability(7, 5)
    name, why = choose_attention("auto", Qwen3Config(), CUDA)
    assert name == "sdpa"
    assert "compute capability 8.0" in why


@pytest.mark.parametrize("name", attention.PACKAGES)
def test_flash_attention_asks_for_its_package_and_for_cuda(name):
    package = attention.PACKAGES[name]
    with pytest.raises(
        ConfigError, match=rf"model.attention '{name}' needs the package {package}, which is not"
    ):
        choose_attention(name, Qwen3Config(), CUDA)
    with pytest.raises(
        ConfigError, match=rf"'{name}' runs on CUDA devices only, and this is cpu. Use 'auto'"
    ):
        choose_attention(name, Qwen3Config(), CPU)


def test_flash_attention_is_taken_where_its_package_is(monkeypatch):
    monkeypatch.setattr(attention.metadata, "distribution", lambda package: package)
    assert choose_attention("flash_attention_2", Qwen3Config(), CUDA)[0] == "flash_attention_2"


def test_a_name_that_is_given_is_kept(make_engine):
    assert make_engine(model={"attention": "eager"}).module.config._attn_implementation == "eager"


def test_an_engine_says_what_it_chose_and_why(make_engine, caplog):
    with caplog.at_level(logging.INFO, logger="engine"):
        engine = make_engine("gemma2")
    assert engine.module.config._attn_implementation == "varlen"
    assert (
        "actor: attention 'varlen': packed sequences as rectangles of similar lengths, exact." in caplog.text
    )


def test_a_plugin_that_builds_the_model_is_given_a_name_that_transformers_knows(make_engine):
    asked = []
    make_engine(hooks={"engine_build_model": lambda role, model_config: asked.append(model_config.attention)})
    assert asked == ["varlen"]
