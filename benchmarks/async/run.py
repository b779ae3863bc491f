"""Steps per second of the same GRPO run in turn and one step off, with the sampler in a process of its own in both.

    python benchmarks/async/run.py --out benchmarks/async/results

Two runs of a random model on word problems: ``rl`` and ``async`` with ``max_staleness = 1``; same rows, same
responses a prompt, same lengths (no end token is likely). ``--hidden`` and ``--response`` set how long training and
sampling take; the first lines tell how even they are. Each trainer process and the sampler's get ``--threads`` cores: on
a machine with fewer than twice as many the two take them from each other, and the run says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from engine_plugin_tools.demo import prepare

ROOT = Path(__file__).parents[2]
WARM = 2  # steps that are not counted: first ones compile, allocate, and wait for what later ones find ready


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--response", type=int, default=48, help="tokens of a response, at most")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--threads", type=int, default=max((os.cpu_count() or 2) // 2, 1), help="of each process"
    )
    parser.add_argument("--updates", choices=("keep", "abort", "drain"), default="keep")
    parser.add_argument("--out", type=Path, help="folder for async.json")
    return parser.parse_args()


def world(folder: Path, given: argparse.Namespace) -> None:
    """Word problems, their tokenizer and the config of a model."""
    prepare.ROWS = {"sft": 8, "train": 256, "heldout": 8}
    prepare.prepare(folder)
    config = folder / "model" / "config.json"
    heads = max(given.hidden // 32, 1)
    shape = {
        "hidden_size": given.hidden,
        "intermediate_size": 4 * given.hidden,
        "num_hidden_layers": given.layers,
        "layer_types": ["full_attention"] * given.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
    }
    config.write_text(json.dumps(json.loads(config.read_text()) | shape))


def measure(folder: Path, given: argparse.Namespace, trainer: str) -> list[dict[str, float]]:
    """The lines of metrics of one run."""
    from engine_core import load_config

    settings: dict[str, Any] = {
        "trainer": trainer,
        "model.path": str(folder / "model"),
        "data.train": str(folder / "data" / "train.jsonl"),
        "data.prompts_per_step": given.prompts,
        "rollout.group_size": given.group_size,
        "rollout.max_response_tokens": given.response,
        "rollout.process": {},
        "reward": [
            {"name": "length", "workers": 1, "length": {"max_tokens": given.response, "buffer_tokens": 8}}
        ],
        "run.dir": str(folder / "runs"),
        "run.name": trainer,
        "run.steps": given.steps,
        "checkpoint.at_end": False,
        "tracking.trackers": [],
        "tracking.rollouts_every_steps": 0,
    }
    if trainer == "async":
        from engine_plugin_trainers.async_trainer import AsyncTrainer as Run

        settings |= {"async.max_staleness": 1, "async.weight_updates": given.updates}
    else:
        from engine_core.train.trainer import Trainer as Run  # type: ignore[assignment]
    run = Run(load_config(overrides=settings))
    run.train()
    run.close()
    return [
        json.loads(line) for line in (folder / "runs" / trainer / "metrics.jsonl").read_text().splitlines()
    ]


def summary(lines: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the steps that count."""
    names = ("step", "generate", "reward", "log_probs", "train", "sync", "sampling")
    counted = lines[WARM:]
    found = {
        name: statistics.median(line[f"time/{name}"] for line in counted)
        for name in names
        if f"time/{name}" in counted[0]
    }
    found["steps_per_second"] = 1 / found["step"]
    found["response_length"] = statistics.median(line["response_length/mean"] for line in counted)
    return found


def main() -> None:
    """Measure both and tell."""
    given = arguments()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    import torch

    from engine_plugin_tools.advice import advice

    torch.set_num_threads(given.threads)
    found: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "settings": {}}
    found["settings"] = {name: value for name, value in vars(given).items() if name != "out"}
    with tempfile.TemporaryDirectory() as folder:
        world(Path(folder), given)
        for trainer in ("rl", "async"):
            lines = measure(Path(folder), given, trainer)
            found[trainer] = summary(lines) | {"advice": advice(lines)}
            print(trainer, json.dumps(found[trainer], indent=1), flush=True)
    found["speedup"] = found["rl"]["step"] / found["async"]["step"]
    print(f"async is {found['speedup']:.2f}x as fast as rl")
    if found["load"] > 1 or (found["cores"] or 0) < 2 * given.threads:
        print(
            "Not a measurement: other work on the machine, or fewer cores than the two processes have threads."
        )
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "async.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
