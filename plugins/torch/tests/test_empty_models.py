"""Models without weights, built from a folder's config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine_core.config import ModelConfig
from engine_core.contracts.weight_names import own_weights
from engine_plugin_torch.model_loading import load_model
from engine_plugin_torch.skeleton import blank_model, empty_parameters, fresh_model


def test_a_blank_model_has_names_shapes_and_types_and_no_weights(model_folder):
    model = ModelConfig(path=model_folder("llama"), attention="eager")
    blank, fresh = blank_model(model, "actor", torch.bfloat16), fresh_model(model, "actor", torch.bfloat16)
    assert {name: (t.shape, t.dtype) for name, t in own_weights(blank).items()} == {
        name: (t.shape, t.dtype) for name, t in own_weights(fresh).items()
    }
    assert {p.device.type for p in blank.parameters()} == {"meta"}
    assert {p.dtype for p in blank.parameters()} == {torch.bfloat16}
    for name, buffer in fresh.named_buffers():
        assert torch.equal(blank.get_buffer(name), buffer)


def test_a_critic_has_one_value(model_folder):
    blank = blank_model(ModelConfig(path=model_folder("llama"), attention="eager"), "critic", torch.float32)
    assert blank.score.weight.shape[0] == 1


def test_a_model_that_is_built_has_the_generation_config_of_its_folder(model_folder):
    path = model_folder("llama")
    model = ModelConfig(path=path, attention="eager")
    assert fresh_model(model, "actor", torch.float32).generation_config.eos_token_id == 2  # of the config
    (Path(path) / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.5}')
    drawn = load_model(model, torch.device("cpu"), torch.float32)
    for module in (
        drawn,
        fresh_model(model, "actor", torch.float32),
        blank_model(model, "actor", torch.float32),
    ):
        assert module.generation_config.eos_token_id == [2, 7]
        assert module.generation_config.temperature == 0.5
    assert not blank_model(model, "critic", torch.float32).can_generate()


def test_tied_weights_stay_one(model_folder):
    blank = blank_model(ModelConfig(path=model_folder("qwen3"), attention="eager"), "actor", torch.float32)
    assert blank.lm_head.weight is blank.get_input_embeddings().weight


def test_modules_are_built_as_ever_after_an_error():
    def stopped():
        with empty_parameters():
            assert nn.Linear(2, 2).weight.device.type == "meta"
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stopped()
    assert nn.Linear(2, 2).weight.device.type == "cpu"
