"""Weights from the trainer's process to vLLM in a process of its own, on one GPU: through its memory (``ipc``) or a connection (``tcp``).

    python benchmarks/vllm/process.py --budget 200
    python benchmarks/vllm/process.py --shape tiny --prompts 2 --response 8   # a try on a CPU: host memory alone

The owner holds bf16 weights as a trainer does; each update goes through ``[rollout.process]`` as in a run. Then greedy tokens are compared
with those of vLLM that was started from a folder with the same weights.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from setting import alone, device, median, seconds, write, write_model

from engine_core.config import ModelConfig, RolloutConfig
from engine_core.config.roles import ProcessConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.data import load_tokenizer
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Sampling
from engine_plugin_processes.sampler_process.engine import SamplerEngine
from engine_plugin_tools.bench.work import requests

UPDATES = 8


def build(path: Path, arguments: argparse.Namespace, stream: Any) -> SamplerEngine:
    """vLLM in a process of its own, started from a folder."""
    gpu = device().type == "cuda"
    table: dict[str, Any] = {
        "max_model_len": arguments.prompt + arguments.response,
        "gpu_memory_utilization": 0.3,
        "enforce_eager": True,
        "dtype": "bfloat16" if gpu else "float32",
        "sleep_level": 0,
    }
    if not gpu:
        table["kv_cache_memory_bytes"] = 1 << 27
    plugins = PluginSet.load({"rollout_engines": {"vllm"}})
    options = plugins.spec("rollout_engines", "vllm").config.model_validate(table)
    settings = ProcessConfig(startup_timeout_minutes=arguments.startup_timeout_minutes, max_restarts=1)
    config = RolloutConfig(
        backend="vllm", max_response_tokens=arguments.response, options=options, process=settings
    )
    model = ModelConfig(path=str(path))
    live = {"tokenizer": load_tokenizer(model)}
    context = WorkerContext(plugins=plugins, role="rollout", device=device(), live=live)
    return SamplerEngine(config, model, context, stream)


def greedy(engine: SamplerEngine, arguments: argparse.Namespace) -> list[list[int]]:
    """Tokens of the same requests."""
    asked = requests(arguments.prompts, 1, arguments.prompt, arguments.response, arguments.vocabulary, seed=0)
    for request in asked:
        request.sampling = Sampling(0.0, max_response_tokens=arguments.response)
    return [r.token_ids[r.prompt_length :].tolist() for r in engine.generate(asked)]


def ended(engine: SamplerEngine) -> None:
    """Close it; what it held of the device is given back before another begins."""
    engine.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(root: Path, arguments: argparse.Namespace, end: float) -> dict[str, Any]:
    """Both transports in turn, then the tokens."""
    own, other = (
        write_model(arguments.shape, root / name, seed) for seed, name in enumerate(("own", "other"))
    )
    arguments.vocabulary = _config(own).vocab_size
    weights = [(name, tensor.to(device())) for name, tensor in load_file(other / "model.safetensors").items()]
    if _config(own).tie_word_embeddings:
        weights = [(name, tensor) for name, tensor in weights if name != "lm_head.weight"]
    found: dict[str, Any] = {
        "tensors": len(weights),
        "megabytes": sum(t.numel() * t.element_size() for _, t in weights) / 1e6,
    }
    begun = time.monotonic()
    engine = build(own, arguments, lambda: iter(weights))
    found["start_s"] = time.monotonic() - begun
    try:
        before = greedy(engine, arguments)
        ways = ["ipc", "tcp"]
        found["ways"] = ways
        for way in ways:
            engine._weights.close()
            engine._weights.transport = way
            times = []
            for number in range(UPDATES):
                if time.monotonic() < end or number < 2:
                    version = engine.version + 1
                    times.append(
                        seconds(lambda version=version: engine.update_weights(iter(weights), version))
                    )
            found[f"{way}_first_ms"] = 1000 * times[0]
            found[f"{way}_ms"] = 1000 * median(times[1:])
            found[f"{way}_gb_per_s"] = found["megabytes"] / found[f"{way}_ms"]
            found[f"{way}_tokens_changed"] = greedy(engine, arguments) != before
            write("process", found, quiet=True)
        after = greedy(engine, arguments)
    finally:
        ended(engine)
    if time.monotonic() < end:
        engine = build(other, arguments, None)
        try:
            found["same_tokens_as_from_the_folder"] = greedy(engine, arguments) == after
        finally:
            ended(engine)
    found["all_s"] = time.monotonic() - begun
    return found


def _config(path: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--response", type=int, default=32, help="tokens")
    parser.add_argument("--startup-timeout-minutes", type=float, default=2.0)
    parser.add_argument("--budget", type=float, default=200, help="seconds after which nothing begins")
    arguments = parser.parse_args()
    alone()
    end = time.monotonic() + arguments.budget
    with tempfile.TemporaryDirectory() as folder:
        write("process", measure(Path(folder), arguments, end))


if __name__ == "__main__":
    main()
