"""Where the weights of a folder without weights are drawn."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import Qwen3Config

from engine_core.config import ModelConfig
from engine_plugin_fsdp import build
from engine_plugin_fsdp.build import FSDPBuilder

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
WEIGHTS = 64 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16 + 2 * 8) + 16


@pytest.mark.parametrize(
    ("device", "memory", "expected"),
    [("cuda:0", 16 * WEIGHTS, "cuda:0"), ("cuda:0", 16 * WEIGHTS - 1, "cpu"), ("cpu", None, "cpu")],
)
def test_random_weights_are_drawn_on_a_device_four_times_their_size(
    device, memory, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(build, "device_bytes", lambda device: memory)
    Qwen3Config(**SMALL, **HEADS).save_pretrained(tmp_path)
    engine = Mock(device=torch.device(device), context=SimpleNamespace(role="actor"))
    model = ModelConfig(path=str(tmp_path), attention="sdpa")
    assert FSDPBuilder(engine)._draws_on(model) == torch.device(expected)
