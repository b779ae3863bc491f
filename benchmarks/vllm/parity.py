"""How far vLLM's log-probs are from the trainer's, before any update: by types, temperature and top-p.

    python benchmarks/vllm/parity.py                             # a tiny model with random weights
    python benchmarks/vllm/parity.py --path demo/sft --sampler bfloat16 bfloat16+fp32_head

Each sampler is started once and asked for the same requests; each trainer scores its rollouts. All log-probs are over the
whole vocabulary, after temperature: those of vLLM are ``rollout_log_probs + support_log_mass``. Prints a table in
Markdown: |difference| of a token's log-prob in nats, mean / largest, and k3, an estimate of the KL.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from setting import alone, device, write, write_model

from engine_core.config import ModelConfig, RoleConfig, RolloutConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.data import load_tokenizer
from engine_core.model_config import load_hf_config
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Batch, Request, Rollout, Sampling
from engine_plugin_tools.bench.work import requests

SAMPLERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16+fp32_head": {"dtype": "bfloat16", "fp32_head": True},
    "bfloat16+fp8_cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
}
EVERYWHERE = 3  # of these: what a CPU has too, and no other policy
TRAINERS = {"fp32": {"compute_dtype": "fp32"}, "bf16": {"compute_dtype": "bf16"}}
CUTS: tuple[dict[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
)


def context(plugins: PluginSet, role: str, **live: Any) -> WorkerContext:
    return WorkerContext(plugins=plugins, role=role, device=device(), live=live)


def sampled(
    path: str, table: dict[str, Any], cuts: list[list[Request]], response: int, eager: bool
) -> list[list[Rollout]]:
    """The rollouts of one start of vLLM, for each way of sampling."""
    plugins = PluginSet.load({"rollout_engines": {"vllm"}})
    place = {"gpu_memory_utilization": 0.4} if device().type == "cuda" else {"kv_cache_memory_bytes": 1 << 28}
    common = {"log_probs": "full", "sleep_level": 0, "max_model_len": 1024, "enforce_eager": eager}
    options = plugins.spec("rollout_engines", "vllm").config(**common, **place, **table)
    config = RolloutConfig(backend="vllm", max_response_tokens=response, options=options)
    model = ModelConfig(path=path)
    worker = context(plugins, "rollout", tokenizer=load_tokenizer(model))
    engine: Any = plugins.resolve("rollout_engines", "vllm")(config, model, worker)
    try:
        return [engine.generate(each) for each in cuts]
    finally:
        engine.close()


def scored(path: str, table: dict[str, str], batches: list[Batch]) -> list[torch.Tensor]:
    """The trainer's log-probs of these batches."""
    plugins = PluginSet.load({"train_engines": {"torch"}})
    options = plugins.spec("train_engines", "torch").config(param_dtype="fp32", **table)
    role = RoleConfig(backend="torch", options=options)
    engine: Any = plugins.resolve("train_engines", "torch")(
        role, ModelConfig(path=path), context(plugins, "ref"), trainable=False
    )
    try:
        return [engine.infer(batch, outputs=("log_probs",))["log_probs"].cpu() for batch in batches]
    finally:
        engine.close()


def difference(batch: Batch, log_probs: torch.Tensor) -> dict[str, float]:
    """Of the sampled tokens: mean and largest |difference|, and k3 = r - log r - 1 with r = trainer / sampler."""
    ratio = (log_probs - batch["rollout_log_probs"])[batch["loss_mask"]].double()
    return {
        "mean": float(ratio.abs().mean()),
        "max": float(ratio.abs().max()),
        "k3": float((torch.expm1(ratio) - ratio).mean()),
        "tokens": len(ratio),
    }


def label(cut: dict[str, float]) -> str:
    return f"T {cut['temperature']}" + (f", top-p {cut['top_p']}" if "top_p" in cut else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", help="model folder; default: random weights")
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--sampler", nargs="*", default=list(SAMPLERS)[:EVERYWHERE], choices=list(SAMPLERS))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument(
        "--eager", action="store_true", help="without compilation and graphs; always so on a CPU"
    )
    parser.add_argument("--budget", type=float, default=300, help="seconds after which no sampler is started")
    arguments = parser.parse_args()
    alone()
    end = time.monotonic() + arguments.budget
    eager = arguments.eager or device().type == "cpu"
    found: dict[str, Any] = {"device": str(device()), "eager": eager}
    with tempfile.TemporaryDirectory() as name:
        path = arguments.path or str(write_model(arguments.shape, Path(name) / "model"))
        vocabulary = load_hf_config(ModelConfig(path=path)).get_text_config().vocab_size
        plain = requests(arguments.prompts, 1, arguments.prompt, arguments.response, vocabulary, seed=0)
        asked = [
            [
                Request(r.id, r.prompt, Sampling(**cut, max_response_tokens=arguments.response, seed=n))
                for n, r in enumerate(plain)
            ]
            for cut in CUTS
        ]
        for sampler in arguments.sampler:
            if time.monotonic() > end:
                break
            try:
                rollouts = sampled(path, SAMPLERS[sampler], asked, arguments.response, eager)
            except Exception as error:  # this vLLM has no such key, or no kernel: the others go on
                print(
                    f"{sampler}: {type(error).__name__}: {(str(error).splitlines() or [''])[-1]}", flush=True
                )
                found[f"{sampler} failed"] = str(error)[:500]
                continue
            batches = [Batch.from_rollouts(r, c["temperature"]) for r, c in zip(rollouts, CUTS, strict=True)]
            for trainer, table in TRAINERS.items():
                for cut, batch, scores in zip(CUTS, batches, scored(path, table, batches), strict=True):
                    found[f"{sampler} | {trainer} | {label(cut)}"] = difference(batch, scores)
            write("parity", found, quiet=True)
    print("| vLLM | trainer | sampling | mean | largest | k3 |\n|---|---|---|---|---|---|")
    for row, values in found.items():
        if isinstance(values, dict):
            print(f"| {row} | {values['mean']:.1e} | {values['max']:.1e} | {values['k3']:.1e} |")


if __name__ == "__main__":
    main()
