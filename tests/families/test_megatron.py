"""The train engine ``megatron`` computes the log-probs and gradients of its families, with layers over two ranks."""

import pytest

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.devices import asked_accelerator
from engine_plugin_testing.families import TRAINS, suites

SCOREBOARD = (pytest.mark.slow, pytest.mark.families)
globals().update(
    suites(
        TrainEngineSuite,
        TRAINS,
        module=__name__,
        marks=SCOREBOARD,
        families=("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma"),
        model={"sliding_window": None},  # Mistral's later models have none
        backend="megatron",
        options={"tp": 2, "sequence_parallel": True},
        world_size=2,
        worker_context="" if asked_accelerator() else "engine_plugin_megatron.cpu_emulation:emulated",
        on_accelerator={"compute_dtype": "fp32"},
    )
)
