"""One engine of vLLM, held against itself: weight updates, memory switches, and our driver beside a bare loop.

    python benchmarks/vllm/speed.py --budget 240
    python benchmarks/vllm/speed.py --shape tiny --prompts 2 --prompt 16 --response 16 --pairs 1   # a try on a CPU

The same ``LLMEngine`` serves both drivers, in turn, so that a busy machine slows both; each run has prompts of its own,
so that none finds its prefix cached. The bare loop is what ``LLM.generate`` does: add all requests, step to the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from parts import of_run, of_switch, of_update, warm
from setting import alone, device, free_gib, median, now, seconds, write, write_model

from engine_core.config import ModelConfig, RolloutConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.contracts.weight_names import own_weights
from engine_core.data import load_tokenizer
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Sampling
from engine_plugin_tools.bench.work import requests
from engine_plugin_torch.weights import published_weights

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of Student's t: 2.5% lie above, for 1, 2, ... degrees of freedom."""


def build(path: Path, arguments: argparse.Namespace) -> Any:
    """The plugin's engine on this device."""
    plugins = PluginSet.load({"rollout_engines": {"vllm"}})
    gpu = device().type == "cuda"
    table: dict[str, Any] = {
        "max_model_len": arguments.prompt + arguments.response,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": not gpu,
        "dtype": "bfloat16" if gpu else "float32",
    }
    if gpu:
        table["max_num_batched_tokens"] = 16384
    options = plugins.spec("rollout_engines", "vllm").config.model_validate(table)
    config = RolloutConfig(backend="vllm", max_response_tokens=arguments.response, options=options)
    model = ModelConfig(path=str(path))
    live = {"tokenizer": load_tokenizer(model)}
    context = WorkerContext(plugins=plugins, role="rollout", device=device(), live=live)
    return plugins.resolve("rollout_engines", "vllm")(config, model, context)


def updates(engine: Any, path: Path) -> dict[str, Any]:
    """Seconds of an update from tensors on the device: bf16 as a bf16 trainer has them, float32 as masters are."""
    from transformers import AutoModelForCausalLM

    from engine_plugin_vllm_rollout.weights import Checksum

    found: dict[str, Any] = {"update_how": engine._updater.how}
    for dtype in (torch.bfloat16, torch.float32):
        module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device())
        weights = list(own_weights(module).items())
        warm()
        times = [_update(engine, weights, version) for version in range(1, 14)]
        found[f"update_{str(dtype)[6:]}_ms"] = 1000 * median(times[3:])
        if dtype == torch.bfloat16:
            checksum = [_sum(Checksum(), weights) for _ in range(8)]
            found |= {"update_tensors": len(weights), "update_first_ms": 1000 * times[0]}
            found["update_checksum_ms"] = 1000 * median(checksum[3:])
            warm()
            found |= of_update(engine, weights)
        stream = [seconds(lambda module=module: list(published_weights(module))) for _ in range(4)]
        found["update_stream_ms"] = 1000 * median(stream[1:])  # what the trainer's side adds
    return found


def _update(engine: Any, weights: list[Any], version: int) -> float:
    return seconds(lambda: engine.update_weights(iter(weights), version))


def _sum(checksum: Any, weights: list[Any]) -> float:
    start = now()
    checksum.add(weights)
    checksum.result()
    return now() - start


def switches(engine: Any, path: Path) -> dict[str, Any]:
    """Seconds and memory of train -> generate -> train at each sleep level, and that the policy stays the same."""
    from safetensors.torch import load_file

    from engine_plugin_vllm_rollout.memory import Memory

    if device().type != "cuda":
        return {}
    weights = [(n, t.to(device())) for n, t in load_file(path / "model.safetensors").items()]
    weights = [(n, t) for n, t in weights if n in engine._updater._shapes]
    greedy = [
        dataclasses.replace(r, sampling=Sampling(0.0, max_response_tokens=32))
        for r in requests(8, 1, 32, 32, 1000, seed=7)
    ]

    def words() -> list[list[int]]:
        return [rollout.token_ids.tolist() for rollout in engine.generate(greedy)]

    engine.update_weights(iter(weights), 100)
    expected, found = words(), {}
    for level in (1, 2):
        engine.memory = Memory(engine._llm, level)
        for _ in range(3):  # the last is told: the first makes pinned memory
            before = free_gib()
            start = now()
            engine.sleep(keep=("weights",))
            slept, given = now() - start, free_gib() - before
            updated = seconds(lambda: engine.update_weights(iter(weights), 101))
            woken = seconds(engine.wake)
        found[f"switch_level{level}_sleep_s"] = slept
        found[f"switch_level{level}_gib_given_back"] = given
        found[f"switch_level{level}_update_s"] = updated
        found[f"switch_level{level}_wake_s"] = woken
        found[f"switch_level{level}_total_s"] = slept + updated + woken
        found |= of_switch(engine, weights, level)
        found[f"switch_level{level}_same_tokens"] = words() == expected
    engine.memory = Memory(engine._llm, 0)
    warm()
    resident = []
    for version in range(102, 109):
        start = now()
        engine.sleep(keep=("weights",))
        engine.update_weights(iter(weights), version)
        engine.wake()
        resident.append(now() - start)
    found["switch_resident_total_s"] = median(resident[2:])
    found["switch_resident_same_tokens"] = words() == expected
    engine.memory = Memory(engine._llm, 1)
    engine.sleep()
    engine.wake()
    found["sleep_and_wake_without_update_same_tokens"] = words() == expected
    return found


def bare(engine: Any, asked: list[Any], **params: Any) -> int:
    """What ``LLM.generate`` does with these prompts; tokens sampled."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    llm, tokens = engine._llm, 0
    for request in asked:
        most = {"max_tokens": request.sampling.max_response_tokens, "seed": request.sampling.seed}
        given = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **most | params)
        llm.add_request(request.id, tokens_input(request.prompt.token_ids), given)
    while llm.has_unfinished_requests():
        tokens += sum(len(output.outputs[0].token_ids) for output in llm.step())
    return tokens


def pairs(engine: Any, arguments: argparse.Namespace, end: float) -> dict[str, Any]:
    """Tokens a second of both drivers in turn: log-probs, none, and what each does by default."""
    vocabulary = engine._vocabulary
    seed = 1000

    def ours(log_probs: bool = True) -> float:
        asked = _asked()
        if not log_probs:
            for request in asked:
                request.sampling = dataclasses.replace(request.sampling, log_probs=False)
        start = now()
        sampled = sum(r.response_length for r in engine.generate(asked))
        return sampled / (now() - start)

    def theirs(**params: Any) -> float:
        asked = _asked()
        start = now()
        sampled = bare(engine, asked, **params)
        return sampled / (now() - start)

    def _asked() -> list[Any]:
        nonlocal seed
        seed += 1
        return requests(arguments.prompts, 8, arguments.prompt, arguments.response, vocabulary, seed=seed)

    ways = {
        "ours_log_probs": ours,
        "bare_log_probs": lambda: theirs(logprobs=0, detokenize=False),
        "ours_none": lambda: ours(log_probs=False),
        "bare_none": lambda: theirs(detokenize=False),
        "bare_defaults": lambda: theirs(seed=None),
    }
    for name in ("ours_log_probs", "bare_log_probs"):
        ways[name]()  # warm
    told: dict[str, float] = {}
    for name in ("ours_none", "bare_none", "ours_log_probs"):
        told |= of_run(engine, name, ways[name])
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.pairs):
        for name, way in ways.items():
            if time.monotonic() < end or not rates[name]:
                rates[name].append(way())
    found: dict[str, Any] = told | {f"tokens_per_s_{name}": median(values) for name, values in rates.items()}
    found |= {f"all_{name}": [round(value) for value in values] for name, values in rates.items()}
    compared = {
        "ours_to_bare_log_probs": ("ours_log_probs", "bare_log_probs"),
        "ours_to_bare_defaults": ("ours_log_probs", "bare_defaults"),
        "ours_to_bare_none": ("ours_none", "bare_none"),
        "ours_none_to_bare_defaults": ("ours_none", "bare_defaults"),
    }
    for name, (ours_way, their_way) in compared.items():
        ratios = [a / b for a, b in zip(rates[ours_way], rates[their_way], strict=False)]
        found[name], found[f"{name}_95"] = median(ratios), interval(ratios)
    return found


def interval(values: list[float]) -> list[float]:
    """Both ends of the 95% interval of the mean, by Student's t; nothing of one value."""
    if len(values) < 2:
        return []
    t = T_95[min(len(values) - 2, len(T_95) - 1)]
    half = t * statistics.stdev(values) / len(values) ** 0.5
    return [statistics.fmean(values) - half, statistics.fmean(values) + half]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--prompts", type=int, default=64, help="each sampled 8 times")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--response", type=int, default=512, help="tokens")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--budget", type=float, default=300, help="seconds after which no further pair begins"
    )
    arguments = parser.parse_args()
    alone()
    end = time.monotonic() + arguments.budget
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(arguments.shape, Path(folder) / "model")
        start = time.monotonic()
        engine = build(path, arguments)
        import vllm

        found: dict[str, Any] = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "start_s": time.monotonic() - start,
        }
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "updates": lambda: updates(engine, path),
            "switches": lambda: switches(engine, path),
            "pairs": lambda: pairs(engine, arguments, end),
        }
        for name, part in parts.items():
            try:
                found |= part()
            except Exception:  # the next part may do better
                found[f"{name}_failed"] = traceback.format_exc()[-2000:]
            write("speed", found, quiet=name != "pairs")
        engine.close()
    if any(name.endswith("_failed") for name in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
