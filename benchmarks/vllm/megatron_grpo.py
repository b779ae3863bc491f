"""GRPO with a Megatron actor and vLLM, each cutting the model over two GPUs in its own way.

    python benchmarks/vllm/megatron_grpo.py --budget 420                     # two GPUs, which both share
    python benchmarks/vllm/megatron_grpo.py --pools --budget 420             # two and two
    python benchmarks/vllm/megatron_grpo.py --case demo --steps 2 --sft-steps 20 --cpu   # a try on a CPU

Cases, each a run of its own:

``demo``        20 steps of the word problems in float32: does the reward rise, do sampler and trainer stay one policy?
``demo_bf16``   the same in bfloat16
``resident``    4 steps of the Qwen3-0.6B shape with random weights in bfloat16, both resident: what handing weights over takes
``trade``       the same with memory handed over (``offload_idle_roles``, sleep level 2)

Prints reward, mismatch and the times of the switch for each step, and a table last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from setting import alone, device, keep_multicast_off, median, write, write_model
from step import COIN

from engine_plugin_tools.demo.prepare import prepare
from engine_plugin_tools.scaffold import new_demo

ROOT = Path(__file__).resolve().parents[2]
TOLD = (
    "reward/mean",
    "mismatch/mean_abs",
    "mismatch/max_abs",
    "mismatch/kl",
    "actor/grad_norm",
    "eval/accuracy",
    "sync/bytes",
    "sync/seconds",
    "time/offload_and_sync",
    "time/sync",
    "time/generate",
    "time/log_probs",
    "time/train",
    "time/step",
    "throughput/generated_tokens_per_second",
)
CASES = {
    "demo": ("demo", {"actor.megatron.compute_dtype": "fp32", "rollout.vllm.dtype": "float32"}),
    "demo_bf16": ("demo", {"actor.megatron.compute_dtype": "bf16", "rollout.vllm.dtype": "bfloat16"}),
    "resident": ("shape", {"runtime.torchrun.offload_idle_roles": False, "rollout.vllm.sleep_level": 0}),
    "trade": ("shape", {"runtime.torchrun.offload_idle_roles": True, "rollout.vllm.sleep_level": 2}),
}
SHAPE = """
plugins = ["coin.py"]
[model]
path = "model"
[actor]
max_tokens_per_rank = {micro}
[actor.optim]
lr = 1e-6
[rollout]
backend = "vllm"
group_size = 8
max_response_tokens = {response}
[rollout.vllm]
max_model_len = {length}
gpu_memory_utilization = 0.3
enforce_eager = true
[[reward]]
name = "coin"
[data]
train = "data.jsonl"
max_prompt_tokens = {prompt}
prompts_per_step = {prompts}
[tracking]
trackers = []
rollouts_every_steps = 0
"""


def engine(end: float, log: Path, folder: Path, words: list[str], settings: dict[str, Any]) -> None:
    """One command of the engine; what it says goes to ``log``."""
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    code = "import sys; from engine_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with log.open("ab") as file:
        done = subprocess.run(
            [sys.executable, "-c", code, *words, *given],
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=max(1.0, end - time.monotonic()),
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"`engine {words[0]}` ended with {done.returncode}")


def layout(arguments: argparse.Namespace) -> dict[str, Any]:
    """Who trains and who samples where."""
    found: dict[str, Any] = {
        "runtime.backend": "torchrun",
        "runtime.torchrun.processes": 4 if arguments.pools else 2,
        "actor.backend": "megatron",
        "actor.megatron.tp": 2,
        "rollout.vllm.tensor_parallel_size": 2,
    }
    if arguments.pools:
        found |= {"placement.actor": "train", "placement.rollout": "serve"}
    return found


def warm_start(folder: Path, log: Path, end: float, steps: int) -> None:
    """Make the demo's run files, data and model, and train it for a few steps on worked solutions."""
    new_demo(folder)
    prepare(folder)
    settings = {
        "model.path": str(folder / "model"),
        "data.train": str(folder / "data" / "sft.jsonl"),
        "run.dir": str(folder / "runs"),
        "run.steps": steps,
    }
    engine(end, log, folder, ["train", str(folder / "sft.toml")], settings)
    engine(end, log, folder, ["export", "runs/sft", str(folder / "sft")], {})


def demo(folder: Path, arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The run file of the word problems, and what is other here."""
    return str(folder / "grpo_vllm.toml"), {
        "model.path": str(folder / "sft"),
        "data.train": str(folder / "data" / "train.jsonl"),
        "data.validation": str(folder / "data" / "heldout.jsonl"),
        "run.steps": arguments.steps,
    }


def shape(folder: Path, arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """A run over random weights and random words."""
    write_model(arguments.shape, folder / "model")
    rng = random.Random(0)
    lines = [
        " ".join(f"t{rng.randrange(200, 400)}" for _ in range(arguments.prompt))
        for _ in range(8 * arguments.prompts)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    (folder / "coin.py").write_text(COIN)
    text = SHAPE.format(
        micro=32768 if device().type == "cuda" else 4096,
        response=arguments.response,
        length=arguments.prompt + arguments.response,
        prompt=arguments.prompt,
        prompts=arguments.prompts,
    )
    (folder / "run.toml").write_text(text)
    return str(folder / "run.toml"), {"run.steps": 4}


def run(
    name: str, folder: Path, file: str, settings: dict[str, Any], arguments: argparse.Namespace, end: float
) -> dict[str, Any]:
    """One run; the metrics of its steps, also where it did not come to its end."""
    log = folder / f"{name}.log"
    settings = {**layout(arguments), **settings, "run.dir": str(folder / "runs"), "run.name": name}
    words = ["train", file]
    if arguments.pools:
        words += ["--set", "placement.pools={train=2,serve=2}"]
    if arguments.cpu:
        settings["actor.megatron.cpu_emulation"] = True
        settings |= {"rollout.vllm.kv_cache_memory_bytes": 1 << 28, "rollout.vllm.enforce_eager": True}
        words.append("--allow-code")
    elif arguments.graphs:
        settings["rollout.vllm.enforce_eager"] = False
    found: dict[str, Any] = {}
    try:
        engine(min(end, time.monotonic() + arguments.case_seconds), log, folder, words, settings)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        found["failed"] = str(error)[:300]
        found["log"] = log.read_text(errors="replace")[-4000:]
    metrics = folder / "runs" / name / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    found |= {key: [round(step[key], 6) for step in steps if key in step] for key in TOLD}
    return {key: values for key, values in found.items() if values}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """What a table has room for; the first step, in which kernels are compiled, is left out of the times."""
    rewards = found.get("reward/mean", [])
    third = max(1, len(rewards) // 3)
    made: dict[str, Any] = {"steps": len(rewards)}
    if rewards:
        made["reward_first_third"] = sum(rewards[:third]) / third
        made["reward_last_third"] = sum(rewards[-third:]) / third
    gaps = found.get("mismatch/mean_abs", [])
    if gaps:
        made |= {"mismatch_first": gaps[0], "mismatch_last": gaps[-1], "mismatch_most": max(gaps)}
    for key in ("sync/seconds", "time/offload_and_sync", "time/generate", "time/train", "time/step"):
        if times := found.get(key, [])[1:]:
            made[f"{key}_median"] = median(times)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=20, help="of the demo")
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument(
        "--pools", action="store_true", help="two GPUs train and two sample; else two do both"
    )
    parser.add_argument("--graphs", action="store_true", help="vLLM with compilation and CUDA graphs")
    parser.add_argument("--cpu", action="store_true", help="with the stand-in of Megatron's tests for CUDA")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--response", type=int, default=256, help="tokens")
    parser.add_argument("--case-seconds", type=float, default=180)
    parser.add_argument("--budget", type=float, default=420)
    arguments = parser.parse_args()
    alone()
    keep_multicast_off()
    if arguments.cpu:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it cannot trace what stands in for CUDA
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as Megatron advises for tensor parallelism
    end = time.monotonic() + arguments.budget
    found: dict[str, Any] = {"pools": arguments.pools}
    name = "megatron_grpo" + "_pools" * arguments.pools
    made: set[str] = set()
    with tempfile.TemporaryDirectory() as root:
        for case in arguments.case:
            kind, settings = CASES[case]
            folder = Path(root) / kind
            folder.mkdir(exist_ok=True)
            if time.monotonic() > end:
                break
            try:
                if kind == "demo" and kind not in made:
                    warm_start(folder, folder / "warm_start.log", end, arguments.sft_steps)
                file, others = (demo if kind == "demo" else shape)(folder, arguments)
                made.add(kind)
                row = run(case, folder, file, {**settings, **others}, arguments, end)
            except Exception as error:  # the next case may do better
                row = {"failed": f"{type(error).__name__}: {error}"[:300]}
                row["log"] = "".join(p.read_text(errors="replace")[-3000:] for p in folder.glob("*.log"))
            found[case] = row | summary(row)
            write(name, found, quiet=True)
    for case, row in found.items():
        if isinstance(row, dict):
            print(f"{case}: {json.dumps({k: v for k, v in row.items() if k != 'log'})}")
            print(row.get("log", ""))
    columns = ("steps", "reward_first_third", "reward_last_third", "mismatch_first", "mismatch_most")
    times = ("sync/seconds", "time/offload_and_sync", "time/generate", "time/train", "time/step")
    print("| case | " + " | ".join((*columns, *times)) + " |\n|" + "---|" * (1 + len(columns) + len(times)))
    for case, row in found.items():
        if isinstance(row, dict):
            told = [row.get(key, "") for key in (*columns, *(f"{key}_median" for key in times))]
            shown = [f"{each:.3g}" if isinstance(each, float) else str(each) for each in told]
            print(f"| {case} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    main()
