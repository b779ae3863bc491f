"""A model cut over two GPUs against the same on one: tokens, log-probs, updates of weights, sleep.

    python benchmarks/vllm/tensor_parallel.py --budget 400
    python benchmarks/vllm/tensor_parallel.py --shape tiny --dtype float32 --prompts 4 --response 16   # a try on a CPU

For each shape and type two engines answer the same requests: ``whole`` (one GPU) and ``ranks`` (two processes of a pool that
share a model: what a run with a trainer on both GPUs has). Each samples, takes other weights in place, samples again, and where it can sleeps, wakes, takes the weights and samples again.
``whole`` is the measure: tokens up to the first difference of a response are compared, their log-probs with ``BOUNDS``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from setting import alone, device, free_gib, keep_multicast_off, median, now, seconds, write, write_model

from engine_core.config import ModelConfig, RolloutConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.data import load_tokenizer
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Sampling
from engine_plugin_tools.bench.work import requests

BOUNDS = {"float32": (1e-4, 2e-3), "bfloat16": (2e-2, 5e-1)}
"""|difference| of a token's log-prob in nats, mean and largest, that two ways of adding up may make."""
WAYS = {"whole": 1, "ranks": 2}  # processes of the pool
SAMPLINGS = {"greedy": 0.0, "sampled": 1.0}
UPDATES = 8
GRACE = 60  # seconds that the last case may take beyond the budget


def build(path: str, way: str, rank: int, arguments: argparse.Namespace) -> Any:
    """The engine of this process."""
    gpu = device().type == "cuda"
    table: dict[str, Any] = {
        "max_model_len": arguments.prompt + arguments.response,
        "gpu_memory_utilization": 0.3,
        "enforce_eager": not arguments.graphs,
        "dtype": arguments.dtype,
        "sleep_level": 2,
        "tensor_parallel_size": 1 if way == "whole" else 2,
    }
    if arguments.plain_reduce and way != "whole":
        table["disable_custom_all_reduce"] = True
    if not gpu:
        table["kv_cache_memory_bytes"] = 1 << 27
    plugins = PluginSet.load({"rollout_engines": {"vllm"}})
    options = plugins.spec("rollout_engines", "vllm").config.model_validate(table)
    config = RolloutConfig(backend="vllm", max_response_tokens=arguments.response, options=options)
    model = ModelConfig(path=path)
    context = WorkerContext(
        plugins=plugins,
        role="rollout",
        device=torch.device("cuda", rank) if gpu else device(),
        rank=rank,
        world_size=WAYS[way],
        live={"tokenizer": load_tokenizer(model)},
    )
    return plugins.resolve("rollout_engines", "vllm")(config, model, context)


def join(rank: int, size: int, folder: Path) -> None:
    """What a worker of the runtime does before it builds engines."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "cuda:nccl,cpu:gloo"
    store = torch.distributed.FileStore(str(folder / f"store{size}-{os.environ['CASE']}"), size)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size)


def answers(engine: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens and log-probs of the same requests, greedy and sampled with seeds; seconds of each."""
    found: dict[str, Any] = {}
    for name, temperature in SAMPLINGS.items():
        asked = requests(arguments.prompts, 1, arguments.prompt, arguments.response, engine._vocabulary, 0)
        for number, request in enumerate(asked):
            request.sampling = Sampling(
                temperature, max_response_tokens=arguments.response, seed=number if temperature else None
            )
        start = now()
        rollouts = engine.generate(asked)
        found[name] = {
            "tokens": [r.token_ids[r.prompt_length :].tolist() for r in rollouts],
            "log_probs": [r.rollout_log_probs[r.prompt_length :].tolist() for r in rollouts],
            "seconds": now() - start,
        }
    return found


def measure(way: str, rank: int, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One engine through all its stations."""
    from safetensors.torch import load_file

    place = torch.device("cuda", rank) if device().type == "cuda" else device()
    begun = time.monotonic()
    engine = build(str(folder / arguments.shape / "model"), way, rank, arguments)
    found: dict[str, Any] = {"start_s": time.monotonic() - begun, "update_how": engine._updater.how}
    try:
        found["before"] = answers(engine, arguments)
        other = load_file(folder / arguments.shape / "other" / "model.safetensors")
        weights = [(name, tensor.to(place)) for name, tensor in other.items()]
        expected = engine._updater._shapes
        weights = [(name, tensor) for name, tensor in weights if name in expected]
        times = [
            seconds(lambda number=number: engine.update_weights(iter(weights), number + 1))
            for number in range(UPDATES)
        ]
        found |= {"update_first_ms": 1000 * times[0], "update_ms": 1000 * median(times[2:])}
        found["after"] = answers(engine, arguments)
        if place.type == "cuda":
            before = free_gib()
            found["sleep_s"] = seconds(engine.sleep)
            found["given_back_gib"] = free_gib() - before
            found["wake_s"] = seconds(engine.wake)
            found["update_after_sleep_s"] = seconds(lambda: engine.update_weights(iter(weights), 100))
            found["woken"] = answers(engine, arguments)
    finally:
        engine.close()
    return found


def run(way: str, folder: Path, arguments: argparse.Namespace, end: float) -> dict[str, Any]:
    """One way, in processes of its own; what rank 0 found, or the last lines of what went wrong."""
    case = f"{arguments.shape}-{arguments.dtype}-{way}{'-graphs' * arguments.graphs}"
    given = vars(arguments) | {"way": way}
    processes, logs = [], []
    for rank in range(WAYS[way]):
        logs.append(folder / f"{case}-{rank}.log")
        command = [sys.executable, __file__, "--worker", json.dumps(given), str(rank), str(folder)]
        with logs[-1].open("wb") as log:
            given_env = {**os.environ, "CASE": case}
            processes.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=given_env, start_new_session=True)
            )
    most = min(end + GRACE, time.monotonic() + arguments.case_seconds)
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > most or any(process.poll() for process in processes):
                break
            time.sleep(0.2)
    finally:
        for process in processes:  # with all that it has started: a GPU must be free for the next case
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result = folder / f"{case}.json"
    if result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    lines = [log.read_text(errors="replace")[-1500:] for log in logs]
    return {"failed": f"exit {[process.returncode for process in processes]}", "lines": lines}


def worker(given: dict[str, Any], rank: int, folder: Path) -> None:
    """One process of a way."""
    arguments = argparse.Namespace(**given)
    way = arguments.way
    if WAYS[way] > 1:
        join(rank, WAYS[way], folder)
    found = measure(way, rank, folder, arguments)
    if rank == 0:
        (folder / f"{os.environ['CASE']}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # all is told: no process waits for the other's end


def compared(whole: dict[str, Any], cut: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Of all stations: the share of tokens before a response's first difference, and |difference| of their log-probs."""
    gaps: list[float] = []
    same = total = 0
    for station in ("before", "after", "woken"):
        for name in SAMPLINGS:
            if station not in whole or station not in cut:
                continue
            one, two = whole[station][name], cut[station][name]
            for tokens, others, logs, their in zip(
                one["tokens"], two["tokens"], one["log_probs"], two["log_probs"], strict=True
            ):
                until = next(
                    (i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), len(tokens)
                )
                gaps += [abs(a - b) for a, b in zip(logs[:until], their[:until], strict=True)]
                same, total = same + until, total + len(tokens)
    mean, most = sum(gaps) / max(1, len(gaps)), max(gaps, default=0.0)
    moved = whole["before"]["sampled"]["log_probs"] != whole["after"]["sampled"]["log_probs"]
    inside = mean <= BOUNDS[dtype][0] and most <= BOUNDS[dtype][1]
    return {
        "tokens": total,
        "same_share": same / max(1, total),
        "mean_gap": mean,
        "largest_gap": most,
        "bounds": BOUNDS[dtype],
        "within_bounds": bool(gaps) and inside and moved,
    }


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", nargs="*", default=["tiny", "qwen3-0.6b"])
    parser.add_argument("--dtype", nargs="*", default=list(BOUNDS), choices=list(BOUNDS))
    parser.add_argument("--way", nargs="*", default=list(WAYS), choices=list(WAYS), help="beside `whole`")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument(
        "--plain-reduce", action="store_true", help="sums by NCCL alone; tried where a way fails without it"
    )
    parser.add_argument("--graphs", action="store_true", help="with compilation and CUDA graphs")
    parser.add_argument("--case-seconds", type=float, default=120)
    parser.add_argument("--budget", type=float, default=400, help="seconds after which no case begins")
    arguments = parser.parse_args()
    alone()
    keep_multicast_off()
    end = time.monotonic() + arguments.budget
    found: dict[str, Any] = {"device": str(device()), "gpus": torch.cuda.device_count()}
    kept: dict[str, dict[str, Any]] = {}
    name = "tensor_parallel" + "_graphs" * arguments.graphs
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        for shape in arguments.shape:
            for seed, model in enumerate(("model", "other")):
                write_model(shape, folder / shape / model, seed)
            for dtype in arguments.dtype:
                for way in ("whole", *(way for way in WAYS if way in arguments.way and way != "whole")):
                    if time.monotonic() > end:
                        continue
                    asked = argparse.Namespace(**vars(arguments) | {"shape": shape, "dtype": dtype})
                    result = run(way, folder, asked, end)
                    if way != "whole" and "failed" in result and not asked.plain_reduce:
                        asked.plain_reduce = True
                        first, result = result, run(way, folder, asked, end)
                        result["without_plain_reduce"] = first
                    kept[way] = result
                    row = {
                        key: value for key, value in result.items() if key not in ("before", "after", "woken")
                    }
                    row |= {f"{s}_s": result["before"][s]["seconds"] for s in SAMPLINGS if "before" in result}
                    if way != "whole" and "before" in result and "before" in kept["whole"]:
                        row |= compared(kept["whole"], result, dtype)
                    found[f"{shape} {dtype} {way}"] = row
                    write(name, found, quiet=True)
    print(
        "| case | within bounds | same tokens | mean gap | largest | update ms | sleep s | wake s | start s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for case, row in found.items():
        if isinstance(row, dict):
            columns = (
                "within_bounds",
                "same_share",
                "mean_gap",
                "largest_gap",
                "update_ms",
                "sleep_s",
                "wake_s",
                "start_s",
            )
            told = [row.get(column, "") for column in columns]
            shown = [f"{each:.3g}" if isinstance(each, float) else str(each) for each in told]
            print(f"| {case} {row.get('failed', '')} | " + " | ".join(shown) + " |")
            for line in row.get("lines", []):
                print(line)


if __name__ == "__main__":
    main()
