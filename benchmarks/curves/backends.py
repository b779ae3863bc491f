"""Does the demo's task learn alike under every train backend? Curves of some seeds each, and how far they lie apart.

    python benchmarks/curves/backends.py                      (or: make curves-backends)
    python benchmarks/curves/backends.py --seeds 0 --steps 6 --evals 2 --sft-steps 20
    python benchmarks/curves/backends.py --jobs 6             on GPUs, in pairs of which each has several runs

All start from one warm start and read the same rows; each is ``grpo.toml`` of ``engine demo`` with the words below.
Below ``--folder``: the runs, a log of each, ``curves.json``, ``curves.png``. Runs that are finished are not done again; one that fails is
told, and the others go on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev

from run import EXAMPLE, QUIET, ROOT, engine, warm_start

TWO = ["runtime.backend=torchrun", "runtime.torchrun.processes=2"]
BACKENDS = {
    "torch": [],
    "fsdp": [*TWO, "actor.backend=fsdp"],
    "deepspeed": [*TWO, "actor.backend=deepspeed"],
    "megatron": [*TWO, "actor.backend=megatron", "actor.megatron.tp=2"],
}
ON_GPUS = ("megatron",)  # alone
STEPS = 105  # of the file

Curve = list[tuple[int, float]]  # step, held-out accuracy
Curves = Mapping[str, Mapping[int, Curve]]  # by backend and seed


def gpus() -> list[str]:
    """Those that this machine has, or that ``CUDA_VISIBLE_DEVICES`` leaves of them."""
    import torch

    count = torch.cuda.device_count()
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]


def devices_of(slot: int, processes: int, found: Sequence[str]) -> str:
    """GPUs of a run: a pair for two processes, of which slots take turns; one of the pair for one. Empty where there are none."""
    pairs = [found[at : at + 2] for at in range(0, len(found) - 1, 2)] or [found]
    turn, place = divmod(slot, len(pairs))
    own = pairs[place]
    return ",".join(own if processes > 1 else own[turn % len(own) :][:1]) if found else ""


def curve(
    folder: Path,
    backend: str,
    seed: int,
    steps: int,
    evals: int,
    devices: str = "",
    seconds: float | None = None,
) -> Curve:
    """Held-out accuracy of one run, before it and at ``evals`` steps of it.

    Args:
        devices: GPUs that it sees; empty: all.
        seconds: most that it may take.
    """
    run = f"{backend}-{seed}"
    given = [*BACKENDS[backend], *QUIET, f"run.name={run}", f"run.seed={seed}", f"run.dir={folder / 'runs'}"]
    given += [f"model.path={folder / 'sft'}", f"data.train={folder / 'data' / 'train.jsonl'}"]
    given += [f"data.validation={folder / 'data' / 'heldout.jsonl'}"]
    given += [f"run.steps={steps}", f"eval.every_steps={max(1, steps // evals)}"]
    words = ["train", str(EXAMPLE / "grpo.toml"), *[w for g in given for w in ("--set", g)]]
    seen = {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
    engine(folder, *words, log=f"{run}.log", seconds=seconds, **seen)
    lines = map(json.loads, (folder / "runs" / run / "metrics.jsonl").read_text().splitlines())
    return [(line.get("step", 0), line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]


def gap(one: Curve, two: Curve) -> float:
    """Mean absolute difference of two curves over the evaluations after the first, which is of one and the same model."""
    pairs = list(zip(one, two, strict=True))[1:]
    return fmean(abs(a - b) for (_, a), (_, b) in pairs)


def overlap(curves: Curves, rows: int) -> list[str]:
    """What the figures say: ends by backend, and gaps between backends beside gaps between seeds.

    Args:
        rows: of the held-out set; an accuracy p is uncertain by ``sqrt(p (1 - p) / rows)``.
    """
    told = ["| backend | seeds | held-out accuracy at the end | lowest to highest |", "|---|---|---|---|"]
    ends = {name: [runs[seed][-1][1] for seed in runs] for name, runs in curves.items()}
    for name, values in ends.items():
        spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
        told.append(
            f"| {name} | {len(values)} | {fmean(values):.3f}{spread} | {min(values):.3f} to {max(values):.3f} |"
        )
    seeds = [
        gap(runs[a], runs[b]) for runs in curves.values() for a, b in itertools.combinations(sorted(runs), 2)
    ]
    if seeds:
        told.append(f"Gap between two seeds of one backend, mean over evaluations: {fmean(seeds):.3f}.")
    for one, two in itertools.combinations(curves, 2):
        shared = sorted(curves[one].keys() & curves[two].keys())
        if not shared:
            continue
        between = fmean(gap(curves[one][seed], curves[two][seed]) for seed in shared)
        low, high = max(min(ends[one]), min(ends[two])), min(max(ends[one]), max(ends[two]))
        meet = (
            f"their ends overlap from {low:.3f} to {high:.3f}" if low <= high else "their ends do not overlap"
        )
        told.append(f"Gap between {one} and {two} of one seed: {between:.3f}; {meet}.")
    middle = fmean(value for values in ends.values() for value in values)
    told.append(
        f"An accuracy of {middle:.2f} over {rows} rows is uncertain by {math.sqrt(middle * (1 - middle) / rows):.3f}."
    )
    return told


def plot(curves: Curves, path: Path) -> None:
    """A line for each seed, a colour for each backend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, runs) in enumerate(curves.items()):
        for number, seed in enumerate(sorted(runs)):
            steps, values = zip(*runs[seed], strict=True)
            axes.plot(steps, values, color=f"C{place}", alpha=0.8, label=None if number else name)
    axes.set(xlabel="step", ylabel="held-out accuracy")
    axes.legend()
    figure.savefig(path, dpi=130)


def run_all(
    folder: Path, cells: Sequence[tuple[str, int]], found: dict, given: argparse.Namespace
) -> list[str]:
    """All runs that are not finished, ``--jobs`` at one time, two-process ones first; what went wrong, a line each."""
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(given.jobs):
        free.put(slot)
    writing, problems, there = threading.Lock(), list[str](), gpus()

    def one(cell: tuple[str, int]) -> None:
        (name, seed), slot, begun = cell, free.get(), time.monotonic()
        processes = 1 if name == "torch" else 2
        devices = devices_of(slot, processes, there)
        try:
            measured = curve(folder, name, seed, given.steps, given.evals, devices, given.run_seconds)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            with writing:
                problems.append(f"{name}-{seed} failed ({type(error).__name__}); the end of its log:")
                problems.append("    " + last_lines(folder / f"{name}-{seed}.log"))
            return
        finally:
            free.put(slot)
        with writing:
            found["runs"][f"{name}-{seed}"] = measured
            found["seconds"][f"{name}-{seed}"] = round(time.monotonic() - begun)
            (folder / "curves.json").write_text(json.dumps(found, indent=1))
            print(
                f"{name}-{seed}: {found['seconds'][f'{name}-{seed}']} s on {devices or 'the CPU'}", flush=True
            )

    left = [cell for cell in cells if f"{cell[0]}-{cell[1]}" not in found["runs"]]
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(one, sorted(left, key=lambda cell: cell[0] == "torch")))
    return problems


def last_lines(log: Path, count: int = 12) -> str:
    return "\n    ".join(log.read_text(errors="replace").splitlines()[-count:]) if log.exists() else "none"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "curves-backends")
    parser.add_argument("--only", nargs="*", choices=list(BACKENDS), help="default: all that run here")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--evals", type=int, default=7, help="evaluations of a run, after the first")
    parser.add_argument("--sft-steps", type=int, help="of the warm start, instead of the file's 400")
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time")
    parser.add_argument("--run-seconds", type=float, help="most that one run may take")
    given = parser.parse_args(arguments)
    names = given.only or [name for name in BACKENDS if gpus() or name not in ON_GPUS]
    folder: Path = given.folder.resolve()
    kept = folder / "curves.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    setting = {"steps": given.steps, "evals": given.evals, "sft_steps": given.sft_steps}
    if not found:
        folder.mkdir(parents=True)  # a folder that exists holds somebody's runs
        begun = time.monotonic()
        warm_start(folder, given.sft_steps)
        print(f"warm start: {time.monotonic() - begun:.0f} s", flush=True)
        found = {"setting": setting, "runs": {}, "seconds": {}}
    elif found["setting"] != setting:
        raise SystemExit(f"{folder} holds runs of {found['setting']}, not {setting}. Give another --folder.")
    problems = run_all(folder, list(itertools.product(names, given.seeds)), found, given)
    runs = {name: {s: found["runs"].get(f"{name}-{s}") for s in given.seeds} for name in names}
    curves = {name: {s: run for s, run in own.items() if run} for name, own in runs.items()}
    curves = {name: own for name, own in curves.items() if own}
    rows = len((folder / "data" / "heldout.jsonl").read_text().splitlines())
    print("\n".join([*problems, *(overlap(curves, rows) if curves else [])]))
    try:
        plot(curves, folder / "curves.png")
    except ImportError:
        print(f"No picture without matplotlib; the same command draws it where {kept} and matplotlib are.")
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
