"""The speed of sampling with transformers; its memory, mostly the cache of keys and values, is unknown.

The seconds of a decode step are those of 0.6B on an H200 (benchmarks/plan): Python starts each layer's operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_core.contracts.memory import DecodeSpeed, MemoryNeed
from engine_plugin_torch.memory import Decoder
from engine_plugin_torch.skeleton import fresh_model

if TYPE_CHECKING:
    from engine_core.config import ModelConfig
    from engine_plugin_hf_rollout.plugin import HFOptions

ITEM = 2  # bytes of bfloat16
LAYER = 1.1e-3  # seconds of a decode step


def memory_need(options: HFOptions, model_config: ModelConfig) -> MemoryNeed | None:
    """Return the speed of a sampler that uses the actor's weights; None for a model that is no dense decoder."""
    with torch.device("meta"):
        model = model_config.model_copy(update={"attention": "eager"})
        module = fresh_model(model, "rollout", torch.bfloat16)
    shape = Decoder.of(module)
    if shape is None:
        return None
    speed = DecodeSpeed(
        weights=ITEM * sum(p.numel() for p in module.parameters()),
        token=2 * shape.layers * shape.keys * ITEM,
        together=options.batch_size,
        reading=0.5,
        step=LAYER * shape.layers,
        products=0.5,
        source="0.6B on an H200",
    )
    return MemoryNeed(unknown=("all",), speed=speed)
