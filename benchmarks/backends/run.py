"""Train backends and their layouts on the same weights and the same batch: loss, gradient norm, speed, memory.

    python benchmarks/backends/run.py --set parity --gpus 2 --out parity.json     # speed, large
    python benchmarks/backends/run.py --set tiny --gpus 2 --device cpu --out tiny.json

A model folder is written once. Each family of cases (torch and FSDP; Megatron; DeepSpeed) has processes of its own; a case that
fails or takes too long is told, and the rest of its family goes on in new ones. Rows are written after every case.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cases import MODELS, SETS
from crew import Crew
from tables import table, verdicts

HERE = Path(__file__).parent
ORDER = ("megatron", "torch", "deepspeed")
STEPS = {"parity": (2, 2), "tiny": (2, 2)}  # steps of a case, and how many are not timed
AT_ONCE = ("parity",)  # sets whose families share the GPUs: nothing is timed
SHARED_MEMORY = Path("/dev/shm")
BYTES = {"qwen3-0.6b": 2e9, "qwen3-1.7b": 4e9, "qwen3-8b": 17e9}  # of a model folder


class Rows:
    """What is known so far, in the order of the cases; written whenever it changes."""

    def __init__(self, cases, out):
        self.out, self.rows, self.writing = out, {case["name"]: None for case in cases}, threading.Lock()
        self.about = {
            case["name"]: {key: case[key] for key in ("family", "model", "types", "prompt")} for case in cases
        }

    def put(self, name, row):
        with self.writing:
            self.rows[name] = {**self.about[name], "case": name, **row}
            self.out.write_text(json.dumps(self.known(), indent=1))
        print(
            f"{name}: {row['error'] if 'error' in row else format(row['case_s'], '.1f') + ' s'}", flush=True
        )

    def known(self):
        return [row for row in self.rows.values() if row is not None]


def place_for(models, given):
    """Where model folders lie: in memory where there is room, else where temporary files do."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        return given
    wanted = 2 * sum(BYTES.get(model, 1e9) for model in models)
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > wanted
    return SHARED_MEMORY if roomy else None


def measure_family(family, cases, crew, new_crew, order, given, until, rows):
    """All cases of a family; in new processes after each that failed."""
    left = list(cases)

    def tell(note):
        if "done" in note:
            rows.put(note["done"], note["row"])

    while left and time.monotonic() < until:
        try:
            stuck, why = crew.run(left, order, given.case_seconds, until, tell)
        finally:
            crew.end()
        if stuck is not None and rows.rows[stuck] is None:
            rows.put(stuck, {"error": why})
        left = [case for case in left if rows.rows[case["name"]] is None]
        if left and time.monotonic() < until:
            crew = new_crew(family)
    for case in left:
        rows.put(case["name"], {"error": "not begun: the time was up"})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=sorted(SETS), required=True)
    parser.add_argument("--gpus", type=int, choices=[2, 4], required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name holds one of these")
    parser.add_argument("--steps", type=int, help="of a case")
    parser.add_argument("--warmup", type=int, help="of these not timed")
    parser.add_argument("--budget", type=float, default=150, help="seconds in all")
    parser.add_argument("--case-seconds", type=float, default=60, help="most of one case")
    parser.add_argument("--models", type=Path, help="folder for model folders, which are kept there")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the rows; logs lie beside it")
    given = parser.parse_args()
    begun = time.monotonic()
    steps, warmup = STEPS.get(given.set, (4, 2))
    steps, warmup = given.steps or steps, warmup if given.warmup is None else given.warmup
    cases = [
        case
        for case in SETS[given.set](given.gpus)
        if not given.only or any(word in case["name"] for word in given.only)
    ]
    models = list(dict.fromkeys(case["model"] for case in cases))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    rows = Rows(cases, given.out)
    logs = given.out.with_suffix("")
    logs.mkdir(exist_ok=True)

    def new_crew(family):
        made = Crew(family, given.gpus, given.device, logs)
        crews.append(made)
        return made

    crews = []
    with tempfile.TemporaryDirectory(dir=place_for(models, given.models)) as scratch:
        folder = given.models or Path(scratch)
        try:
            families = [family for family in ORDER if any(case["family"] == family for case in cases)]
            first = {family: new_crew(family) for family in families}
            write_models(models, folder, given)
            print(f"models written after {time.monotonic() - begun:.0f} s", flush=True)
            order = {
                "folders": {name: str(folder / name) for name in models},
                "models": {name: MODELS[name] for name in models},
                "steps": steps,
                "warmup": min(warmup, steps),
            }

            def measure_all(family):
                own = [case for case in cases if case["family"] == family]
                until = begun + given.budget
                measure_family(family, own, first[family], new_crew, order, given, until, rows)

            with ThreadPoolExecutor(len(families) if given.set in AT_ONCE else 1) as pool:
                list(pool.map(measure_all, families))
        except subprocess.SubprocessError as error:  # of write_models: there is nothing to measure
            for case in cases:
                rows.put(case["name"], {"error": f"no model folder: {type(error).__name__}"})
        finally:
            for crew in crews:
                crew.end()
    print(table(rows.known()))
    print("\n".join(verdicts(rows.known())))
    print(f"{time.monotonic() - begun:.0f} s in all")


def write_models(models, folder, given):
    """In a process of its own, whose device memory is free afterwards."""
    missing = [model for model in models if not (folder / model).exists()]
    command = [sys.executable, str(HERE / "weights.py"), "--out", str(folder), "--device", given.device]
    if missing:
        subprocess.run([*command, "--model", *missing], check=True, timeout=given.budget)


if __name__ == "__main__":
    main()
