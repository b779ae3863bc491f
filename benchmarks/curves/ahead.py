"""Does the demo's task learn alike with rollouts that run ahead? Curves of some seeds each, held against the band of those in turn.

    python benchmarks/curves/ahead.py --jobs 9 --threads 3
    python benchmarks/curves/ahead.py --seeds 0 1 --steps 6 --evals 2 --sft-steps 20 --jobs 1     # a try

All start from one warm start and read the same rows; each is ``grpo.toml`` of ``engine demo`` with the words below, on a CPU. Those
that run ahead have their sampler in a process of its own. Below ``--folder``: the runs and ``ahead.png``; ``ahead.json`` lies there
and in ``$OUT``, and grows with each run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from backends import Curve, last_lines, plot
from run import EXAMPLE, QUIET, ROOT, engine, warm_start

AHEAD = ["trainer=async", "rollout.process={}"]
VARIANTS = {
    "in turn": [],
    "ahead by 1": [*AHEAD, "async.max_staleness=1"],
    "ahead by 2": [*AHEAD, "async.max_staleness=2"],
}
MORE = {
    **{
        f"{name}, less momentum": [*words, "actor.optim.betas=[0.8,0.999]"]
        for name, words in VARIANTS.items()
    },
    "carried over": ["rollout.over_sampling=1.5", "rollout.partial_rollouts=true"],
}
"""Only where asked for. Updates that come late act like more momentum (docs/async.md): what taking some away does, ahead and in turn.
In turn with unfinished responses carried over (docs/stragglers.md)."""
LR = "1.2e-4"
"""What docs/async.md advises for updates that are behind; the band is of runs with the same rate."""
STEPS = 105
MOST_THREADS = 4  # of the warm start: the model is tiny
ERRORS = 1.96  # standard errors of an accuracy over the held-out rows


def curve(
    folder: Path, variant: str, seed: int, given: argparse.Namespace, variables: Mapping[str, str], end: float
) -> tuple[Curve, dict[str, float]]:
    """Held-out accuracy of one run, before it and at ``--evals`` steps of it; means of some of its metrics.

    Raises:
        RuntimeError: it failed, or was not done at ``end`` (``time.monotonic``).
    """
    run = f"{variant.replace(', ', '-').replace(' ', '-')}-{seed}"
    words = [
        *(VARIANTS | MORE)[variant],
        *QUIET,
        f"run.name={run}",
        f"run.seed={seed}",
        f"run.dir={folder / 'runs'}",
    ]
    words += [f"model.path={folder / 'sft'}", f"data.train={folder / 'data' / 'train.jsonl'}"]
    words += [f"data.validation={folder / 'data' / 'heldout.jsonl'}", f"actor.optim.lr={given.lr}"]
    words += [f"run.steps={given.steps}", f"eval.every_steps={max(1, given.steps // given.evals)}"]
    sets = [word for each in words for word in ("--set", each)]
    try:
        engine(
            folder, "train", str(EXAMPLE / "grpo.toml"), *sets,
            log=f"{run}.txt", seconds=max(1.0, end - time.monotonic()), **variables,
        )  # fmt: skip
    except subprocess.SubprocessError as error:
        raise RuntimeError(f"{error}\n{last_lines(folder / f'{run}.txt')}") from error
    lines = [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    told = (
        "time/step",
        "async/staleness_mean",
        "async/staleness_max",
        "actor/approx_kl",
        "mismatch/mean_abs",
    )
    values = {name: [line[name] for line in lines if name in line] for name in told}
    means = {name: sum(found) / len(found) for name, found in values.items() if found}
    return [(line.get("step", 0), line["eval/accuracy"]) for line in lines if "eval/accuracy" in line], means


def inside(band: Sequence[Curve], one: Curve, rows: int) -> tuple[int, int, int]:
    """Evaluations after the first, which is of the model that all start from.

    Args:
        band: curves in turn, of the same steps.
        one: a curve to hold against them.
        rows: of the held-out set.

    Returns:
        How many lie between the lowest and the highest of the band; how many do where each end is widened by what an
        accuracy is uncertain by; how many there are.
    """
    strict = near = 0
    for at in range(1, len(one)):
        values = [each[at][1] for each in band]
        low, high, value = min(values), max(values), one[at][1]
        strict += low <= value <= high
        near += low - _error(low, rows) <= value <= high + _error(high, rows)
    return strict, near, len(one) - 1


def _error(accuracy: float, rows: int) -> float:
    return ERRORS * math.sqrt(accuracy * (1 - accuracy) / rows)


def verdict(curves: Mapping[str, Mapping[int, Curve]], rows: int) -> list[str]:
    """A table: ends, and how much of each curve is in the band of those in turn."""
    band = curves.get("in turn", {})
    told = [
        "| run | seed | accuracy at the end | evaluations in the band | in the band and its error |",
        "|---|---|---|---|---|",
    ]
    for variant, runs in curves.items():
        for seed, one in sorted(runs.items()):
            # one that is of the band itself is held against the others of it
            others = [each for other, each in band.items() if (variant, seed) != ("in turn", other)]
            strict, near, count = inside(others, one, rows) if others else (0, 0, 0)
            told.append(
                f"| {variant} | {seed} | {one[-1][1]:.3f} | {strict} of {count} | {near} of {count} |"
            )
    ends = {variant: [one[-1][1] for one in runs.values()] for variant, runs in curves.items() if runs}
    for variant, values in ends.items():
        told.append(f"{variant}: ends from {min(values):.3f} to {max(values):.3f}.")
    return told


def main(arguments: Sequence[str] | None = None) -> None:
    """Every run, as many at one time as ``--jobs``, then the verdict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "curves-ahead")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=[*VARIANTS, *MORE])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", default=LR)
    parser.add_argument("--evals", type=int, default=7, help="evaluations of a run, after the first")
    parser.add_argument("--sft-steps", type=int, help="of the warm start, instead of the file's 400")
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time")
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which runs are ended")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    given = parser.parse_args(arguments)
    folder: Path = given.folder.resolve()
    folder.mkdir(parents=True)  # a folder that exists holds somebody's runs
    out = Path(os.environ.get("OUT", folder))
    out.mkdir(parents=True, exist_ok=True)
    variables = {"OMP_NUM_THREADS": str(given.threads), "CUDA_VISIBLE_DEVICES": ""}
    begun = time.monotonic()
    few = min(given.jobs * given.threads, MOST_THREADS)
    warm_start(folder, given.sft_steps, **variables | {"OMP_NUM_THREADS": str(few)})
    print(f"warm start: {time.monotonic() - begun:.0f} s", flush=True)
    settings = {name: value for name, value in vars(given).items() if name != "folder"}
    found: dict[str, Any] = {"settings": settings, "runs": {}, "means": {}, "failed": {}}
    curves: dict[str, dict[int, Curve]] = {variant: {} for variant in given.only}
    rows = len((folder / "data" / "heldout.jsonl").read_text().splitlines())
    with ThreadPoolExecutor(given.jobs) as pool:
        # those that run ahead first: they take longest
        cells = [(variant, seed) for seed in given.seeds for variant in reversed(given.only)]
        futures = {
            pool.submit(curve, folder, *cell, given, variables, begun + given.budget): cell for cell in cells
        }
        for future in as_completed(futures):
            variant, seed = futures[future]
            name = f"{variant} {seed}"
            try:
                curves[variant][seed], found["means"][name] = future.result()
                found["runs"][name] = curves[variant][seed]
            except Exception as error:
                found["failed"][name] = f"{type(error).__name__}: {error}"
            found["seconds"] = time.monotonic() - begun
            found["verdict"] = verdict(curves, rows)
            print(f"{name}: {found['seconds']:.0f} s after the beginning", flush=True)
            for place in {folder, out}:
                (place / "ahead.json").write_text(json.dumps(found, indent=1) + "\n")
    plot({name: runs for name, runs in curves.items() if runs}, folder / "ahead.png")
    print(
        "\n".join(
            [*verdict(curves, rows), *(f"failed: {name}: {why}" for name, why in found["failed"].items())]
        )
    )


if __name__ == "__main__":
    main()
