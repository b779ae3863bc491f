"""Step time, idle shares and the controller's cost over many workers: what ``results/growth.json`` holds.

    python benchmarks/simulator/run.py --out benchmarks/simulator/results/growth.json

Each result is written down as soon as it is there; those that the file has already are not worked out again. Virtual
results do not depend on the machine; ``controller_s`` is CPU seconds of the one that runs this, and ``load`` what else it
had to do: a busy machine makes them larger, so the least of some repetitions is the nearest to what an idle one takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from engine_plugin_tools.bench.simulator.runs import MODES, Setting
from engine_plugin_tools.bench.simulator.speeds import Lengths, speeds_of
from engine_plugin_tools.bench.simulator.sweep import sweep

BASE = Setting(prompts_per_worker=1.0)
SETTINGS = {
    "growth": BASE,
    "data-worker": dataclasses.replace(BASE, data_workers=1),
    "star": dataclasses.replace(BASE, weights="star"),
    "equal": dataclasses.replace(BASE, lengths=Lengths(300, 300, 8192)),
    "training": dataclasses.replace(BASE, lengths=Lengths(300, 300, 8192), prompts_per_worker=16),
}
"""``growth``: long tails, weights handed on; ``data-worker``: the same, prompts tokenized by a process of their own; ``star``: weights from one rank to each; ``equal``: short and equal lengths;
``training``: the same, with so many that a step is mostly training."""


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--setting", choices=SETTINGS, default="growth")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 64, 256, 1024])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--speeds", default="qwen3-8b")
    parser.add_argument("--steps", type=int, default=6, help="that count, at least: see counted")
    parser.add_argument(
        "--repeat", type=int, default=1, help="of these runs the one with the least controller_s is kept"
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def counted(steps: int, mode: str) -> int:
    """As many, or some more: ahead by S versions one step of S + 1 waits for the longest response, for all of them."""
    turn = MODES[mode].staleness + 1
    return -(-steps // turn) * turn


def main() -> None:
    """Simulate what the file lacks."""
    given = arguments()
    found: list[dict[str, Any]] = json.loads(given.out.read_text())["results"] if given.out.exists() else []
    for workers in given.workers:
        for mode in given.modes:
            wanted = {"setting": given.setting, "workers": workers, "mode": mode}
            if any(all(result[key] == value for key, value in wanted.items()) for result in found):
                continue
            steps = counted(given.steps, mode)
            setting = dataclasses.replace(
                SETTINGS[given.setting], speeds=speeds_of(given.speeds), steps=steps
            )
            made = [sweep(setting, [workers], [mode])[0] for _ in range(given.repeat)]
            result = min(made, key=lambda each: each["controller_s"])
            about = {"speeds": given.speeds, "steps": steps, "repeats": given.repeat}
            found.append({**wanted, **about, "load": os.getloadavg()[0], **result})
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps({"results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
