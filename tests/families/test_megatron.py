"""The train engine ``megatron`` computes the log-probs and gradients of its families, with layers over two ranks."""

import pytest

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.devices import asked_accelerator
from engine_plugin_testing.families import RECURRENT, TRAINS, suites

SCOREBOARD = (pytest.mark.slow, pytest.mark.families)
NORMS_AFTER = "megatron-core 0.16 has no norms after attention and feed-forward"
GAPS = {
    **dict.fromkeys(RECURRENT, "recurrent layers are not built here"),
    **dict.fromkeys(("gemma3_text", "olmo2", "olmo3", "glm4", "exaone4"), NORMS_AFTER),
    "apertus": "megatron-core 0.16 has no activation xIELU",
    "cohere2": "megatron-core 0.16 computes feed-forward after attention, not next to it",
    "deepseek_v3": "latent attention is not built here",
    "ernie4_5": "interleaved rotary positions are not built here",
    "gemma2": "megatron-core 0.16 has no soft caps and no norms after attention",
    "glm4_moe": "rotary positions of a part of each head are not built here",
    "gpt_oss": "attention here has no sinks",
    "granite": "megatron-core 0.16 has no factor of residuals",
    "hunyuan_v1_dense": "megatron-core 0.16 normalizes heads before their rotation, not after it",
    "ministral": "attention here has no sliding windows",
    "ministral3": "rotary positions of YaRN are not built here",
    "phi3": "a rank would need several ranges of its fused weights",
}

globals().update(
    suites(
        TrainEngineSuite,
        TRAINS,
        module=__name__,
        marks=SCOREBOARD,
        gaps=GAPS,
        model={"sliding_window": None},  # Mistral's later models have none
        backend="megatron",
        options={"tp": 2, "sequence_parallel": True},
        world_size=2,
        worker_context="" if asked_accelerator() else "engine_plugin_megatron.cpu_emulation:emulated",
        on_accelerator={"compute_dtype": "fp32"},
    )
)
