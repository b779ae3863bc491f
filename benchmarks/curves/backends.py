"""Does the demo's task learn alike under every train backend? Curves of some seeds each, and how far they lie apart.

    python benchmarks/curves/backends.py                      (or: make curves-backends)
    python benchmarks/curves/backends.py --seeds 0 --steps 6 --evals 2 --sft-steps 20

All start from one warm start and read the same rows; each is ``examples/word_problems/grpo.toml`` with the words below.
Below ``--folder``: the runs, ``curves.json``, ``curves.png``. Runs that are finished are not done again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from run import EXAMPLE, QUIET, ROOT, engine, warm_start

TWO = ["runtime.backend=torchrun", "runtime.torchrun.processes=2"]
BACKENDS = {
    "torch": [],
    "fsdp": [*TWO, "actor.backend=fsdp"],
    "deepspeed": [*TWO, "actor.backend=deepspeed"],
}
STEPS = 105  # of the file

Curve = list[tuple[int, float]]  # step, held-out accuracy
Curves = Mapping[str, Mapping[int, Curve]]  # by backend and seed


def curve(folder: Path, backend: str, seed: int, steps: int, evals: int) -> Curve:
    """Held-out accuracy of one run, before it and at ``evals`` steps of it."""
    run = f"{backend}-{seed}"
    given = [*BACKENDS[backend], *QUIET, f"run.name={run}", f"run.seed={seed}", f"run.dir={folder / 'runs'}"]
    given += [f"model.path={folder / 'sft'}", f"data.train={folder / 'data' / 'train.jsonl'}"]
    given += [f"data.validation={folder / 'data' / 'heldout.jsonl'}"]
    given += [f"run.steps={steps}", f"eval.every_steps={max(1, steps // evals)}"]
    engine(folder, "train", str(EXAMPLE / "grpo.toml"), *[w for g in given for w in ("--set", g)])
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

    from engine_core.report import COLORS

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for (name, runs), color in zip(curves.items(), COLORS, strict=False):
        for number, seed in enumerate(sorted(runs)):
            steps, values = zip(*runs[seed], strict=True)
            axes.plot(steps, values, color=color, alpha=0.8, label=None if number else name)
    axes.set(xlabel="step", ylabel="held-out accuracy")
    axes.legend()
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "curves-backends")
    parser.add_argument("--only", nargs="*", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--evals", type=int, default=7, help="evaluations of a run, after the first")
    parser.add_argument("--sft-steps", type=int, help="of the warm start, instead of the file's 300")
    given = parser.parse_args(arguments)
    folder: Path = given.folder.resolve()
    kept = folder / "curves.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    setting = {"steps": given.steps, "evals": given.evals, "sft_steps": given.sft_steps}
    if not found:
        folder.mkdir(parents=True)  # a folder that exists holds somebody's runs
        warm_start(folder, given.sft_steps)
        found = {"setting": setting, "runs": {}, "seconds": {}}
    elif found["setting"] != setting:
        raise SystemExit(f"{folder} holds runs of {found['setting']}, not {setting}. Give another --folder.")
    for name, seed in itertools.product(given.only, given.seeds):
        if (run := f"{name}-{seed}") not in found["runs"]:
            begun = time.monotonic()
            found["runs"][run] = curve(folder, name, seed, given.steps, given.evals)
            found["seconds"][run] = round(time.monotonic() - begun)
            print(f"{run}: {found['seconds'][run]} s", flush=True)
            kept.write_text(json.dumps(found, indent=1))
    curves = {name: {seed: found["runs"][f"{name}-{seed}"] for seed in given.seeds} for name in given.only}
    plot(curves, folder / "curves.png")
    rows = len((folder / "data" / "heldout.jsonl").read_text().splitlines())
    print("\n".join(overlap(curves, rows)))


if __name__ == "__main__":
    main()
