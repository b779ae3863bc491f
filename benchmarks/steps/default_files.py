"""Whole GRPO steps of default run files: seconds by phase, MFU of the training phase, peak memory.

    python benchmarks/steps/default_files.py --cases 0.6b 1.7b 4b-x2 --steps 4 --seconds 280
    python benchmarks/steps/default_files.py --cases scaling --steps 4 --seconds 280   # the cases of four GPUs
    python benchmarks/steps/default_files.py --cases scaling --steps 2 --tiny          # the same layouts on a CPU

A case of ``cases.py`` is one `engine train` with random weights of a Qwen3 shape: 64 prompts, or as many as its name says,
x 8 responses, 256 + 512 tokens, sampled by vLLM, and no key that tunes anything. The first step (compilation, first update) is shown and not counted.
Efficiency is that of the same shape on one GPU, if it is among the cases before: seconds of a step there, over those here.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "memory"))

from cases import CASES, PROMPT, RESPONSE, SCALING, write


def run(
    name: str, steps: int, seconds: float, keys: list[str], keep: Path | None = None, tiny: bool = False
) -> dict[str, Any]:
    """Run a case; return its metrics by step, the seconds to the end of step 1, and how it ended.

    Args:
        name: of the case.
        steps: of the run.
        seconds: after which the run is ended.
        keys: ``KEY=VALUE``, for ``--set``.
        keep: a folder that the run is written to and that stays.
        tiny: see ``write``.
    """
    with contextlib.nullcontext(str(keep)) if keep else tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        folder.mkdir(exist_ok=True)
        write(CASES[name], folder, steps, tiny)
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
            "tiny": tiny,
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
        return f"{row['case']:17} no step: {row['error']}"

    def median(key: str) -> float:
        return statistics.median(step.get(key, 0.0) for step in steps)

    phases = ("time/generate", "time/log_probs", "time/train", "time/sync", "time/offload_and_sync")
    parts = "  ".join(f"{key[5:]} {median(key):.2f}" for key in phases if median(key))
    from engine_plugin_tools.bench.shapes import SHAPES, Cost

    peak = max((v for step in steps for k, v in step.items() if k.endswith("/peak_gib")), default=0.0)
    case = CASES[row["case"]]
    cost, rows = None if case.model or row["tiny"] else Cost.of(SHAPES[case.shape]), case.prompts * 8
    work = cost.train([PROMPT + RESPONSE] * rows, RESPONSE * rows) if cost else 0.0
    learners = case.learners or case.gpus
    mfu = work / median("time/train") / (989e12 * learners) if median("time/train") else 0.0
    first = row["steps"][0]["time/step"]
    setup = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["start"].items())
    return (
        f"{row['case']:17} step {median('time/step'):.2f} s: {parts}  MFU of training {mfu:.1%}  peak {peak:.1f} GiB  "
        f"first step {first:.1f} s, done {row['first_step_done']:.0f} s after the start  ({len(steps)} steps) {row['error']}\n"
        f"{'':17} of the start: {setup}"
    )


def efficiency(row: dict[str, Any], before: list[dict[str, Any]]) -> str:
    """Return the efficiency beside one GPU with as many prompts, or nothing if that is not known."""
    case = CASES[row["case"]]
    for other in before:
        one = CASES[other["case"]]
        alike = (one.shape, one.gpus, one.prompts) == (case.shape, 1, case.prompts / case.gpus)
        if alike and case.gpus > 1 and not case.model and min(len(row["steps"]), len(other["steps"])) > 1:
            each = [statistics.median(s["time/step"] for s in r["steps"][1:]) for r in (other, row)]
            return f"{'':17} efficiency {each[0] / each[1]:.2f} of {other['case']}"
    return ""


def main() -> int:
    """Run the cases one after another and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "scaling"], default=["0.6b"])
    parser.add_argument(
        "--tiny", action="store_true", help="the layout of each case with a tiny model, on CPUs"
    )
    parser.add_argument("--steps", type=int, default=4, help="of which the first is not counted")
    parser.add_argument("--seconds", type=float, default=280, help="for each case")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys over the run file's")
    parser.add_argument("--keep", type=Path, help="folder that the run is written to, of one case")
    parser.add_argument("--out", type=Path, help="file of JSON lines")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rows: list[dict[str, Any]] = []
    for name in SCALING if arguments.cases == ["scaling"] else arguments.cases:
        row = run(name, arguments.steps, arguments.seconds, arguments.set, arguments.keep, arguments.tiny)
        print(*filter(None, (show(row), efficiency(row, rows))), sep="\n", flush=True)
        rows.append(row)
        if not row["steps"]:
            print(row["log"][-2500:], flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
