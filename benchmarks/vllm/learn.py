"""GRPO on the demo's word problems with vLLM: the reward rises and sampler and trainer stay one policy.

    python benchmarks/vllm/learn.py --budget 200 --steps 20

Makes the demo's data and warm start first (the ``torch`` engine alone), then trains with ``grpo.toml`` of ``engine demo``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from setting import alone, device, write

from engine_plugin_tools.demo.prepare import prepare
from engine_plugin_tools.scaffold import new_demo

VLLM = [
    "rollout.backend=vllm",
    "run.name=grpo_vllm",
    "rollout.vllm.dtype=float32",
    "rollout.vllm.max_num_seqs=320",
]
VLLM += ["rollout.vllm.enforce_eager=true", "rollout.vllm.gpu_memory_utilization=0.3"]


def engine(end: float, *words: str) -> None:
    """One command of the engine, ended with the budget."""
    code = "import sys; from engine_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], timeout=max(1.0, end - time.monotonic()), check=False
    )
    if done.returncode:
        raise SystemExit(done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--budget", type=float, default=240)
    arguments = parser.parse_args()
    alone()
    end = time.monotonic() + arguments.budget
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)

        def at(key: str, place: str) -> list[str]:
            return ["--set", f'{key}="{folder}/{place}"']

        runs = at("run.dir", "runs")
        sft = [
            *at("model.path", "model"),
            *at("data.train", "data/sft.jsonl"),
            "--steps",
            str(arguments.sft_steps),
        ]
        new_demo(folder)
        engine(end, "train", str(folder / "sft.toml"), *runs, *sft)
        engine(end, "export", str(folder / "runs" / "sft"), str(folder / "sft"))
        data = [*at("data.train", "data/train.jsonl"), *at("data.validation", "data/heldout.jsonl")]
        gpu = ["--set", "rollout.vllm.enforce_eager=false"] if device().type == "cuda" else []
        vllm = [word for setting in VLLM for word in ("--set", setting)]
        words = [*vllm, *runs, *at("model.path", "sft"), *data, *gpu, "--steps", str(arguments.steps)]
        ended = ""
        try:
            engine(end, "train", str(folder / "grpo.toml"), *words)
        except (SystemExit, subprocess.TimeoutExpired) as error:  # the steps that it has done are told
            ended = str(error)
        lines = (folder / "runs" / "grpo_vllm" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    told = (
        "reward/mean",
        "mismatch/mean_abs",
        "mismatch/max_abs",
        "mismatch/kl",
        "eval/accuracy",
        "time/generate",
        "time/step",
        "sync/seconds",
    )
    found = {key: [round(step[key], 5) for step in steps if key in step] for key in told}
    found = {key: values for key, values in found.items() if values}
    third = max(1, len(found["reward/mean"]) // 3)
    found["reward_first_third"] = sum(found["reward/mean"][:third]) / third
    found["reward_last_third"] = sum(found["reward/mean"][-third:]) / third
    write("learn", found | ({"ended": ended} if ended else {}))
    if ended:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
