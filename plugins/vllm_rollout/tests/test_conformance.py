from engine_plugin_testing import RolloutEngineSuite


class TestVLLM(RolloutEngineSuite):
    backend = "vllm"
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": 256,
        "sleep_level": 0,  # several engines at once: only one in a process can sleep
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 1 << 26,
        "log_probs": "full",
    }
    model = {"head_dim": 32}  # the smallest that vLLM's attention knows
    worker_context = "pooled.py:one_engine"
    deadline = 600.0
