"""Random weights are drawn where they are used."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config

from engine_core.config import ModelConfig
from engine_plugin_torch.model_loading import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator"),
]


def test_random_weights_are_the_same_at_each_time_and_in_each_type(tmp_path):
    Qwen3Config(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2).save_pretrained(
        tmp_path
    )
    device, model = torch.accelerator.current_accelerator(), ModelConfig(path=str(tmp_path))
    state = torch.get_device_module(device).get_rng_state()
    first, second = (load_model(model, device, torch.float32).state_dict() for _ in range(2))
    half = load_model(model, device, torch.bfloat16).state_dict()
    assert torch.equal(torch.get_device_module(device).get_rng_state(), state)  # the run's own is left alone
    for name, tensor in first.items():
        assert tensor.device.type == device.type
        assert torch.equal(second[name], tensor), name
        assert torch.equal(half[name], tensor.bfloat16()), name
    other = load_model(model.model_copy(update={"seed": 1}), device, torch.float32).state_dict()
    assert any(not torch.equal(other[name], tensor) for name, tensor in first.items())
