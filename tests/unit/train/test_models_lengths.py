"""The longest sequence of a model."""

from types import SimpleNamespace

import torch

from engine_core.train.models import model_length, text_config


def test_a_sampler_is_held_to_what_a_model_was_trained_for():
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=16))
    assert model_length(text_config(None, None, SimpleNamespace(config=config))) == 16


def test_of_a_module_without_a_config_nothing_is_known():
    assert model_length(text_config(None, None, torch.nn.Linear(2, 2))) > 1 << 20
