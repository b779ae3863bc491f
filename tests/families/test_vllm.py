"""The rollout engine ``vllm`` samples from every family that it has."""

import pytest

from engine_plugin_testing import RolloutEngineSuite
from engine_plugin_testing.families import SAMPLES, suites

SCOREBOARD = (pytest.mark.slow, pytest.mark.families)
globals().update(
    suites(
        RolloutEngineSuite,
        SAMPLES,
        module=__name__,
        marks=SCOREBOARD,
        backend="vllm",
        options={
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": 256,
            "sleep_level": 0,
            "gpu_memory_utilization": 0.2,
            "kv_cache_memory_bytes": 1 << 26,
            "log_probs": "full",
            "enable_prefix_caching": False,  # vLLM on CPUs has none for recurrent layers
        },
        model={
            "hidden_size": 128,
            "head_dim": 32,
            "moe_intermediate_size": 32,
        },  # sizes that its kernels for CPUs know
        worker_context="../../plugins/vllm_rollout/tests/pooled.py:one_engine",
        deadline=600.0,
    )
)
