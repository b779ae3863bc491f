"""The rollout engine ``vllm`` samples from every family that its CPU build has."""

import pytest

from engine_plugin_testing import RolloutEngineSuite
from engine_plugin_testing.families import SAMPLES, suites

SCOREBOARD = (pytest.mark.slow, pytest.mark.families)
SIZES = {  # those that vLLM's kernels for CPUs have
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "mamba_d_head": 32,
    "mamba_d_ssm": 256,
}
GAPS = {
    "apertus": "log-probs differ by up to 3e-3 nats in float32",
    "cohere2": "log-probs of vLLM 0.32 differ behind the sliding window",
    "deepseek_v3": "vLLM has no latent attention of this size on CPUs",
    "glm4_moe": "log-probs of vLLM 0.32 on CPUs are off by nats",
    "gpt_oss": "vLLM has no kernel for its experts on CPUs",
    "lfm2": "vLLM 0.32 reads `conv_dim`, which the config of transformers 5.17 lacks",
    "qwen3_5_text": "vLLM's class needs torchvision, which was not installed",
    "qwen3_next": "vLLM's CPU build computes its recurrent layers in bfloat16 alone",
}

globals().update(
    suites(
        RolloutEngineSuite,
        SAMPLES,
        module=__name__,
        marks=SCOREBOARD,
        gaps=GAPS,
        model=SIZES,
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
        worker_context="../../plugins/vllm_rollout/tests/pooled.py:one_engine",
        deadline=600.0,
    )
)
