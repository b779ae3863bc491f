"""The speed that a role's plan is made with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine_core.contracts.memory import MemoryQuestion
from engine_plugin_torch.options import TorchOptions
from engine_plugin_torch.precision import Precision
from engine_plugin_torch.speed import CAST, COMPILED, EAGER, speed_of

HALF = Precision(torch.bfloat16, torch.bfloat16)
MIXED = Precision(torch.float32, torch.bfloat16)


def test_more_bytes_move_without_compilation_and_with_copies_of_the_weights():
    options = TorchOptions()
    assert speed_of(options, HALF, True, 0.0).traffic == COMPILED
    assert speed_of(options, HALF, False, 0.0).traffic == EAGER
    assert speed_of(options, MIXED, True, 0.0).traffic == COMPILED + CAST
    assert speed_of(options, HALF, True, 0.5).repeated == 0.5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantize", "nf4"),
        ("fp8", "tensorwise"),
        ("sp", 2),
        ("tp", 2),
        ("cpu_offload", "params"),
        ("stage", 3),
    ],
)
def test_options_that_were_not_measured_have_no_speed(key, value):
    class Options:
        pass

    options = Options()
    assert speed_of(options, HALF, True, 0.0) is not None
    setattr(options, key, value)
    assert speed_of(options, HALF, True, 0.0) is None


def test_float32_has_no_speed():
    assert speed_of(TorchOptions(), Precision(torch.float32, torch.float32), True, 0.0) is None


def test_the_answer_of_a_role_has_the_recomputation_of_its_options(model_folder):
    from engine_core.config import ModelConfig, RoleConfig
    from engine_plugin_torch.engine import TorchEngine

    ask = MemoryQuestion("actor", trainable=True, device_bytes=1 << 40, tokens=4096, length=64)
    model = ModelConfig(path=str(model_folder("qwen3")))
    config = RoleConfig(options=TorchOptions(activation_checkpointing=True, compile=True))
    speed = TorchEngine.memory_need(config, model, ask).speed
    assert (speed.repeated, speed.traffic) == (1.0, COMPILED + CAST)
    passing = TorchEngine.memory_need(config, model, replace(ask, trainable=False)).speed
    assert passing.repeated == 0.0
