"""What the config of a model says about it."""

from __future__ import annotations

import pytest
from transformers import (
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

from engine_core.model_config import is_dense


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        (LlamaConfig(), True),
        (Qwen3Config(), True),
        (Gemma3TextConfig(), True),  # with sliding windows
        (MixtralConfig(), False),
        (Glm4MoeConfig(), False),
        (DeepseekV3Config(), False),
        (Ernie4_5_MoeConfig(), False),
        (Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]), False),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_model_with_experts_or_with_layers_of_other_kinds_is_not_dense(config, dense):
    assert is_dense(config.to_dict()) == dense
