"""What Ray costs: the same GRPO run on ``ray`` and on ``torchrun``, in turn, and the time of a call without work.

    python benchmarks/ray/run.py --out benchmarks/ray/results

Actor and sampler are in one process (``--split``: in two, so that weights cross), on the CPU, with a random model on
sums. Runs alternate, so that a machine that changes its pace does so for both; the ratio is of the medians of their
steps without the first ones. Needs an idle machine: other work is measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

BACKENDS = ("torchrun", "ray")
WARM = 2  # steps that are not counted
CALLS = 300


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each backend")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--response", type=int, default=32, help="tokens of a response")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--split", action="store_true", help="actor and sampler in processes of their own")
    parser.add_argument("--out", type=Path, help="folder for ray.json")
    return parser.parse_args()


def settings(folder: Path, given: argparse.Namespace, backend: str, name: str) -> dict[str, Any]:
    """Of one run."""
    pools = {
        "placement.pools": {"train": 1, "serve": 1},
        "placement.actor": "train",
        "placement.rollout": "serve",
    }
    return {
        "model.path": str(folder / "model"),
        "data.train": str(folder / "train.jsonl"),
        "data.prompts_per_step": given.prompts,
        "rollout.group_size": 8,
        "rollout.max_response_tokens": given.response,
        "reward": [{"name": "numeric", "workers": 0}],
        "run.dir": str(folder / "runs"),
        "run.name": name,
        "run.steps": given.steps,
        "checkpoint.at_end": False,
        "tracking.trackers": [],
        "runtime.backend": backend,
        **(pools if given.split else {}),
    }


def world(folder: Path, hidden: int) -> None:
    """A random model and sums."""
    from engine_core.testing import reference

    reference.write_model(folder / "model", {"hidden_size": hidden, "intermediate_size": 4 * hidden}, 0, True)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(16) for b in range(16)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step of one run, of its start, and of a call that does nothing."""
    from engine_core import Trainer, load_config

    began = time.perf_counter()
    trainer = Trainer(load_config(config))
    try:
        trainer.setup()
        started = time.perf_counter() - began
        calls = []
        for _ in range(CALLS):
            before = time.perf_counter()
            trainer.groups["actor"].call("mark").result()
            calls.append(time.perf_counter() - before)
    finally:
        trainer.close()
    trainer = Trainer(load_config(config))
    try:
        trainer.train()
    finally:
        trainer.close()
    lines = (trainer.folder.path / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["time/step"] for line in lines][WARM:]
    return {"steps": steps, "start": started, "call": statistics.median(calls)}


def main() -> None:
    """Measure, and say what came out."""
    given = arguments()
    found: dict[str, list[dict[str, Any]]] = {backend: [] for backend in BACKENDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        world(folder, given.hidden)
        for number in range(given.rounds):
            for backend in BACKENDS if number % 2 == 0 else BACKENDS[::-1]:
                found[backend].append(measure(settings(folder, given, backend, f"{backend}{number}")))
    result: dict[str, Any] = {
        "arguments": {k: str(v) for k, v in vars(given).items()},
        "load": os.getloadavg()[0],
    }
    for backend, runs in found.items():
        result[backend] = {
            "step_seconds": statistics.median(second for run in runs for second in run["steps"]),
            "start_seconds": statistics.median(run["start"] for run in runs),
            "call_seconds": statistics.median(run["call"] for run in runs),
            "steps": [run["steps"] for run in runs],
        }
        shown = {key: round(value, 5) for key, value in result[backend].items() if key != "steps"}
        print(f"{backend:9} {shown}")
    result["ratio"] = result["ray"]["step_seconds"] / result["torchrun"]["step_seconds"]
    print(
        f"step of ray / step of torchrun: {result['ratio']:.4f}  (load of the machine: {result['load']:.1f})"
    )
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "ray.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
