"""Whole GRPO steps of default run files: seconds by phase, MFU of the training phase, peak memory.

    python benchmarks/steps/default_files.py --cases 0.6b 1.7b 4b-x2 --steps 4 --seconds 280
    python benchmarks/steps/default_files.py --cases tiny                  # a try on a CPU

A case is one `engine train` with random weights of a Qwen3 shape: 64 prompts x 8 responses, 256 + 512 tokens, sampled by
vLLM, and no key that tunes anything. The first step (compilation, first update) is shown and not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "memory"))

from plan_vs_peak import write_inputs

PROMPT, RESPONSE = 256, 512


@dataclass(frozen=True)
class Case:
    """A model's shape, the GPUs, and the lines that the number of GPUs asks for."""

    shape: str
    gpus: int = 1
    more: str = ""
    prompts: int = 64


TWO = '[runtime]\nbackend = "torchrun"\n[rollout.process]\n[actor]\nbackend = "fsdp"\n'
CASES = {
    "0.6b": Case("qwen3-0.6b"),
    "0.6b-process": Case("qwen3-0.6b", 1, "[rollout.process]\n"),
    "1.7b": Case("qwen3-1.7b"),
    "4b": Case("qwen3-4b"),
    "0.6b-x2": Case("qwen3-0.6b", 2, TWO),
    "1.7b-x2": Case("qwen3-1.7b", 2, TWO),
    "1.7b-x2-128": Case("qwen3-1.7b", 2, TWO, 128),
    "1.7b-x4-256": Case("qwen3-1.7b", 4, TWO, 256),
    "4b-x2": Case("qwen3-4b", 2, TWO),
    "tiny": Case("tiny", prompts=4),
}
FILE = """
trainer = "rl"
plugins = ["even.py"]
[model]
path = "model"
[rollout]
backend = "{sampler}"
group_size = 8
max_response_tokens = {response}
max_log_prob_gap = 100.0
[[reward]]
name = "even"
[algorithm]
advantage = "grpo"
[data]
train = "rows.jsonl"
max_prompt_tokens = {prompt}
prompts_per_step = {prompts}
[run]
dir = "runs"
name = "run"
steps = {steps}
[checkpoint]
at_end = false
[tracking]
trackers = []
rollouts_every_steps = 0
"""
REWARD = '''"""A reward: the share of even tokens."""

from engine_core import hookimpl
from engine_core.specs import Reward


def even(completion_ids: list[list[int]]) -> list[float]:
    """Return the share of even tokens of each response."""
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in completion_ids]


@hookimpl
def engine_rewards():
    """Offer the reward."""
    return {"even": Reward(load=even)}
'''


def run(name: str, steps: int, seconds: float, keys: list[str], keep: Path | None = None) -> dict[str, Any]:
    """Run a case; return its metrics by step, the seconds to the end of step 1, and how it ended.

    Args:
        name: of the case.
        steps: of the run.
        seconds: after which the run is ended.
        keys: ``KEY=VALUE``, for ``--set``.
        keep: a folder that the run is written to and that stays.
    """
    case = CASES[name]
    with contextlib.nullcontext(str(keep)) if keep else tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        folder.mkdir(exist_ok=True)
        write_inputs(case.shape, folder)
        (folder / "even.py").write_text(REWARD)
        words = {"sampler": "vllm", "response": RESPONSE, "prompt": PROMPT, "prompts": case.prompts}
        if case.shape == "tiny":
            words |= {"sampler": "hf", "response": 16, "prompt": 32}
        row = {"prompt": " ".join(f"t{i % 400 + 3}" for i in range(int(words["prompt"])))}
        (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * case.prompts)
        (folder / "run.toml").write_text(FILE.format(**words, steps=steps) + case.more)
        metrics, log = folder / "runs/run/metrics.jsonl", folder / "log"
        code = "import sys; from engine_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
        more = [part for key in keys for part in ("--set", key)]
        began, first, error = time.monotonic(), 0.0, ""
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", code, "train", "run.toml", *more], cwd=folder, stdout=file, stderr=file
            )
            while process.poll() is None and time.monotonic() < began + seconds:
                time.sleep(0.2)
                if not first and metrics.exists() and metrics.stat().st_size:
                    first = time.monotonic() - began
            if process.poll() is None:
                error = f"ended after {seconds:.0f} s"
                process.kill()
            process.wait()
        if process.returncode and not error:
            error = f"exit status {process.returncode}"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return {
            "case": name,
            "first_step_done": first,
            "error": error,
            "steps": [json.loads(line) for line in lines],
            "start": _start(metrics.with_name("timeline.jsonl")),
            "log": log.read_text(errors="replace")[-12000:],
        }


def _start(timeline: Path) -> dict[str, float]:
    """Return the seconds of the parts of the setup, by name."""
    names = ("setup", "load inputs", "plan memory", "build ")
    spans = (
        [json.loads(line) for line in timeline.read_text().split("\n") if line] if timeline.exists() else []
    )
    return {name: end - start for _, _, name, start, end in spans if name.startswith(names)}


def show(row: dict[str, Any]) -> str:
    """Return a line: medians of the steps after the first."""
    steps = row["steps"][1:] or row["steps"]
    if not steps:
        return f"{row['case']:12} no step: {row['error']}"

    def median(key: str) -> float:
        return statistics.median(step.get(key, 0.0) for step in steps)

    phases = ("time/generate", "time/log_probs", "time/train", "time/sync", "time/offload_and_sync")
    parts = "  ".join(f"{key[5:]} {median(key):.2f}" for key in phases if median(key))
    from engine_plugin_tools.bench.shapes import SHAPES, Cost

    peak = max((v for step in steps for k, v in step.items() if k.endswith("/peak_gib")), default=0.0)
    cost, case = Cost.of(SHAPES[CASES[row["case"]].shape]), CASES[row["case"]]
    rows = case.prompts * 8
    work = cost.train([PROMPT + RESPONSE] * rows, RESPONSE * rows) if cost else 0.0
    mfu = work / median("time/train") / (989e12 * case.gpus) if median("time/train") else 0.0
    first = row["steps"][0]["time/step"]
    setup = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["start"].items())
    return (
        f"{row['case']:12} step {median('time/step'):.2f} s: {parts}  MFU of training {mfu:.1%}  peak {peak:.1f} GiB  "
        f"first step {first:.1f} s, done {row['first_step_done']:.0f} s after the start  ({len(steps)} steps) {row['error']}\n"
        f"{'':12} of the start: {setup}"
    )


def main() -> int:
    """Run the cases one after another and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["0.6b"])
    parser.add_argument("--steps", type=int, default=4, help="of which the first is not counted")
    parser.add_argument("--seconds", type=float, default=280, help="for each case")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys over the run file's")
    parser.add_argument("--keep", type=Path, help="folder that the run is written to, of one case")
    parser.add_argument("--out", type=Path, help="file of JSON lines")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in arguments.cases:
        row = run(name, arguments.steps, arguments.seconds, arguments.set, arguments.keep)
        print(show(row), flush=True)
        if not row["steps"]:
            print(row["log"][-2500:], flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
