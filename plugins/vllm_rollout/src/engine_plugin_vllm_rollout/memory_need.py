"""The device memory of a vLLM sampler before vLLM is started: weights, KV cache, workspace and CUDA graphs.

The cache takes what `gpu_memory_utilization` leaves, and at least one sequence of the longest length.
Workspace and graphs are fitted to measurements, not derived: benchmarks/memory compares them with peaks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from engine_core.contracts.memory import DecodeSpeed, MemoryNeed, MemoryQuestion
from engine_core.model_config import load_hf_config
from engine_plugin_vllm_rollout.plugin import WITHOUT_PLAN

if TYPE_CHECKING:
    from engine_core.config import ModelConfig
    from engine_plugin_vllm_rollout.plugin import EngineOptions

GIB = 2**30
ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}
GRAPHS = GIB // 2  # of CUDA graphs, with compiled code
BATCHED = 2048  # vLLM's default of max_num_batched_tokens for an engine that a program starts
SHARE_OF_ALL = 0.25  # part of the device that a sampler may take from the trainer's favorite micro-batch
SLACK = GIB  # in a chosen share, for what the estimate misses; vLLM makes cache of what it does not need
STEP = 0.005  # gpu_memory_utilization is rounded up to a multiple
MOST = 0.92  # of the device


def memory_need(
    options: EngineOptions, model_config: ModelConfig, question: MemoryQuestion
) -> MemoryNeed | None:
    """Estimate the memory of one rank of a sampler; see ``TrainEngine.memory_need``."""
    config: Any = load_hf_config(model_config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not model_config.trust_remote_code:
        return None
    text, tp = config.get_text_config(decoder=True), options.tensor_parallel_size
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=model_config.trust_remote_code)
    weights = _weights(module, options) // tp
    token = cache_bytes(text, options) // tp
    working = {"workspace": _workspace(text, options)}
    graphs = 0 if options.enforce_eager else GRAPHS
    fixed = weights + graphs + working["workspace"]
    model_length = getattr(text, "max_position_embeddings", None) or 8192
    longest = options.max_model_len or model_length
    least = longest * token  # vLLM refuses a cache without room for one sequence
    each = min(question.length or longest, longest)
    wanted = max(least, min(options.max_num_seqs, question.sequences or options.max_num_seqs) * each * token)
    device, share, chosen = question.device_bytes, options.gpu_memory_utilization, {}
    if share == "auto" and question.role != "rollout":
        share = WITHOUT_PLAN  # only the sampler's share is chosen
    if share == "auto":
        free = None if question.free is None else question.free - fixed - SLACK
        share = _share(fixed, least, wanted, free, device)
        chosen = {"vllm.gpu_memory_utilization": share}
    cache = int(options.passed_on().get("kv_cache_memory_bytes") or max(least, int(share * device) - fixed))
    parts = {"graphs": graphs, "weights": weights, "cache": cache}
    level = getattr(options, "sleep_level", 0)
    freed = {0: (), 1: ("cache",), 2: ("weights", "cache")}[level]
    return MemoryNeed(
        {name: size for name, size in parts.items() if name not in freed},
        {name: size for name, size in parts.items() if name in freed},
        working,
        chosen=chosen,
        speed=_speed(options, weights, token),
    )


def _speed(options: EngineOptions, weights: int, token: int) -> DecodeSpeed | None:
    """Return the speed, fitted to measurements on H200s (benchmarks/plan); None for options that were not measured."""
    if options.enforce_eager or options.tensor_parallel_size > 1 or options.dtype == "float32":
        return None
    return DecodeSpeed(
        weights,
        token,
        options.max_num_seqs,
        reading=0.77,
        step=1.9e-3,
        sequence=4.8e-6,
        products=0.5,
        update=1 / 110e9,
        source="0.6B and 4B on H200s",
    )


def _share(fixed: int, least: int, wanted: int, free: int | None, device: int) -> float:
    """Return a share of the device: room for the wanted cache, or for what is free, but at least a quarter of the device.

    Args:
        fixed: bytes of the sampler without its cache.
        least: bytes of the smallest cache.
        wanted: bytes of the cache with which no response waits.
        free: bytes for the cache that other roles leave; None: not known yet.
        device: bytes of the device.
    """
    floor = max(least, min(wanted, int(SHARE_OF_ALL * device) - fixed))
    cache = min(wanted, max(floor, wanted if free is None else free))
    whole, unit = fixed + cache + SLACK, max(1, int(STEP * device))
    steps = whole // unit if cache == free else -(-whole // unit)  # what is free is not exceeded
    return round(min(MOST, steps * STEP), 3)


def cache_bytes(text: Any, options: EngineOptions) -> int:
    """Return the bytes of the KV cache for a token: keys and values of every layer."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kind = getattr(options, "kv_cache_dtype", "auto")
    item = 1 if kind.startswith("fp8") else ITEM[options.dtype]
    return int(2 * text.num_hidden_layers * heads * size * item)


def _weights(module: torch.nn.Module, options: EngineOptions) -> int:
    """Return the bytes of the weights: with `quantization` linear layers but the head have one byte a weight."""
    item = ITEM[options.dtype]
    total = sum(p.numel() for p in module.parameters()) * item
    if getattr(options, "quantization", None) is None:
        return total
    head = getattr(module, "get_output_embeddings", lambda: None)()
    linear = [m for m in module.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return total - sum(m.weight.numel() for m in linear) * (item - 1)


def _workspace(text: Any, options: EngineOptions) -> int:
    """Return the bytes of vLLM's profile run: logits of all sequences in float32, three times, and one layer."""
    item = ITEM[options.dtype]
    tokens = options.passed_on().get("max_num_batched_tokens") or BATCHED
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    logits = options.max_num_seqs * text.vocab_size * (item + 3 * 4)
    return int(logits + tokens * item * (3 * wide + 4 * text.hidden_size))
