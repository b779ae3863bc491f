"""Simulate a run on many workers: step time, idle devices, staleness, the controller's cost.

    python benchmarks/simulator/run.py --workers 64 --modes sync async-1 --steps 2
    python benchmarks/simulator/run.py --out benchmarks/simulator/results/growth.json

With ``--out`` each result is written as soon as it is known, and a result that the file already has is not computed again.
Virtual times do not depend on the machine. ``controller_s`` is CPU seconds of the machine that runs this, and ``load`` its
load: a busy machine makes them larger, so the least of some repetitions is the nearest to that of an idle one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from virtual_cluster.runs import MODES, Setting, simulate
from virtual_cluster.speeds import SPEEDS, WAYS, Lengths

from engine_core.cli.output import print_table

SETTINGS = {
    "growth": {},
    "data-worker": {"data_workers": 1},
    "star": {"weights": "star"},
    "equal": {"median": 300, "p99": 300},
    "training": {"median": 300, "p99": 300, "prompts": 16},
}
"""Defaults of options. ``growth``: long tails, relayed weights; ``data-worker``: a process tokenizes the prompts; ``star``: one
rank sends the weights to each sampler; ``equal``: short and equal lengths; ``training``: so many that a step is mostly
training."""

COLUMNS = {
    "workers": "{:d}",
    "mode": "{}",
    "step_s": "{:.2f}",
    "tokens_per_s": "{:,.0f}",
    "idle_samplers": "{:.0%}",
    "idle_trainers": "{:.0%}",
    "idle": "{:.0%}",
    "age": "{:.2f}",
    "controller_s": "{:.3f}",
    "controller_share": "{:.2%}",
}
"""Columns of the table, with their formats; ``age`` is the mean staleness of the learned tokens."""


def arguments() -> argparse.Namespace:
    """Return the options of the command line, with the defaults of ``--setting``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--setting", choices=SETTINGS, default="growth", help="defaults of other options")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 64, 256, 1024], help="devices")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--speeds", choices=SPEEDS, default="qwen3-8b", help="of which model")
    parser.add_argument("--prompts", type=float, default=1.0, help="of a step, for each worker")
    parser.add_argument("--group-size", type=int, default=8, help="responses of a prompt")
    parser.add_argument("--median", type=float, default=300.0, help="tokens of a response")
    parser.add_argument("--p99", type=float, default=4096.0, help="99th percentile of the tokens")
    parser.add_argument("--max-response-tokens", type=int, default=8192)
    parser.add_argument("--trainer-share", type=float, default=0.25, help="of the workers, if async")
    parser.add_argument("--weights", choices=WAYS, default="relay", help="how samplers receive weights")
    parser.add_argument("--data-workers", type=int, default=0, help="processes that tokenize prompts")
    parser.add_argument("--steps", type=int, default=6, help="that count, at least: see counted")
    parser.add_argument(
        "--repeat", type=int, default=1, help="of these runs the one with the least controller_s is kept"
    )
    parser.add_argument("--out", type=Path, help="JSON file that keeps the results")
    parser.set_defaults(**SETTINGS[parser.parse_args().setting])
    return parser.parse_args()


def counted(steps: int, mode: str) -> int:
    """Return ``steps`` rounded up to whole turns: ahead by S versions, one step of S + 1 waits for the longest response."""
    turn = MODES[mode].staleness + 1
    return -(-steps // turn) * turn


def setting_of(given: argparse.Namespace, workers: int, mode: str) -> Setting:
    """Return the parameters of one simulation."""
    return Setting(
        workers=workers,
        mode=mode,
        speeds=SPEEDS[given.speeds],
        lengths=Lengths(given.median, given.p99, given.max_response_tokens),
        prompts_per_worker=given.prompts,
        group_size=given.group_size,
        trainer_share=given.trainer_share,
        weights=given.weights,
        data_workers=given.data_workers,
        steps=counted(given.steps, mode),
    )


def measured(setting: Setting, repeat: int) -> dict[str, Any]:
    """Return the result with the least ``controller_s`` of some simulations, without the lines of each step."""
    result = min((simulate(setting) for _ in range(repeat)), key=lambda each: each["controller_s"])
    del result["lines"]
    seconds = f"{result['step_s']:.4g} s a step"
    print(f"{setting.workers} workers, {setting.mode}: {seconds}", file=sys.stderr, flush=True)
    return result


def row(result: dict[str, Any]) -> list[str]:
    """Return a result as a row of the table."""
    age = sum(int(old) * share for old, share in result["staleness"].items())
    return [form.format((result | {"age": age})[name]) for name, form in COLUMNS.items()]


def main() -> None:
    """Simulate each mode at each number of workers, unless the file has it; print a table of the new results."""
    given = arguments()
    out: Path | None = given.out
    found: list[dict[str, Any]] = json.loads(out.read_text())["results"] if out and out.exists() else []
    settings = [setting_of(given, workers, mode) for workers in given.workers for mode in given.modes]
    new = []
    for setting in settings:  # all were checked before the first one runs
        wanted = {"setting": given.setting, "workers": setting.workers, "mode": setting.mode}
        if any(all(result[key] == value for key, value in wanted.items()) for result in found):
            continue
        about = {"speeds": given.speeds, "steps": setting.steps, "repeats": given.repeat}
        result = measured(setting, given.repeat)
        new.append({**wanted, **about, "load": os.getloadavg()[0], **result})
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps({"results": found + new}, indent=1) + "\n")
    print_table([row(result) for result in new], header=list(COLUMNS))


if __name__ == "__main__":
    main()
