"""Does each algorithm learn the demo's task? Held-out accuracy before and after, for some seeds.

    python benchmarks/curves/run.py                      (or: make curves)
    python benchmarks/curves/run.py --only gspo ppo --seeds 0 --steps 10

All start from one warm start; each is ``grpo.toml`` of ``engine demo`` with the changes below, so a
row is what a user gets by changing these keys. Runs lie below ``--folder``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine_plugin_tools.demo.prepare import prepare
from engine_plugin_tools.scaffold import TEMPLATES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = TEMPLATES / "demo"

VARIANTS = {
    "grpo": [],
    "rloo": ["algorithm.advantage=rloo"],
    "cispo": ["algorithm.loss=cispo"],
    "gspo": ["algorithm.loss=gspo"],
    "ppo": ["algorithm.advantage=gae", "critic.optim.lr=1e-3", "critic.warmup_steps=3"],
    "dapo": ['stage=[{name="dynamic_sampling"}]', "algorithm.mask_truncated=true"],
}
QUIET = ["tracking.trackers=[]", "tracking.rollouts_every_steps=0", "checkpoint.at_end=false"]


def engine(
    folder: Path, *words: str, log: str = "log.txt", seconds: float | None = None, **variables: str
) -> None:
    """Run one command in processes of its own, with one thread where no variable says otherwise.

    Args:
        folder: where it runs.
        log: file there that its output is added to.
        seconds: after which it is ended, with the processes that it started.
        variables: of its environment, besides this process's.

    Raises:
        subprocess.SubprocessError: it failed, or took too long.
    """
    # it works in another folder, where relative places mean nothing
    places = [
        str(Path(place).absolute()) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "engine_core.cli.main", *words]
    with (folder / log).open("a") as told:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=told, stderr=told, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        finally:
            if process.poll() is None:
                _end(process)
    if code:
        raise subprocess.CalledProcessError(code, command)


def _end(process: subprocess.Popen) -> None:
    """First asked, then not: a run that is asked ends its workers itself."""
    for what, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, what)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return


def warm_start(folder: Path, steps: int | None = None, **variables: str) -> None:
    """Data, tokenizer, a random model, and the SFT that all variants start from (``steps``: instead of the file's)."""
    prepare(folder)
    given = [f"model.path={folder / 'model'}", f"data.train={folder / 'data' / 'sft.jsonl'}"]
    given += [f"run.dir={folder / 'runs'}", "run.name=sft"]
    given += [] if steps is None else [f"run.steps={steps}"]
    words = [w for g in given for w in ("--set", g)]
    engine(folder, "train", str(EXAMPLE / "sft.toml"), *words, **variables)
    engine(folder, "export", str(folder / "runs" / "sft"), str(folder / "sft"), **variables)


def accuracies(folder: Path, name: str, seed: int, steps: int | None) -> tuple[float, float]:
    """Held-out accuracy before and after one run."""
    run = f"{name}-{seed}"
    given = [*VARIANTS[name], *QUIET, f"run.name={run}", f"run.seed={seed}", f"run.dir={folder / 'runs'}"]
    given += [f"model.path={folder / 'sft'}"]
    given += [f"data.{split}={folder / 'data' / file}.jsonl" for split, file in
              (("train", "train"), ("validation", "heldout"))]  # fmt: skip
    given += [] if steps is None else [f"run.steps={steps}"]
    engine(folder, "train", str(EXAMPLE / "grpo.toml"), *[w for g in given for w in ("--set", g)])
    lines = map(json.loads, (folder / "runs" / run / "metrics.jsonl").read_text().splitlines())
    found = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    return found[0], found[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "curves")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="instead of the file's 105")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at one time")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True)  # a folder that exists holds somebody's runs
    warm_start(folder)
    cells = [(name, seed) for name in arguments.only for seed in arguments.seeds]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = dict(
            zip(cells, pool.map(lambda c: accuracies(folder, *c, arguments.steps), cells), strict=True)
        )
    print("| algorithm |", " | ".join(f"seed {seed}" for seed in arguments.seeds), "|")
    print("|---|" + "---|" * len(arguments.seeds))
    for name in arguments.only:
        shown = [f"{found[name, seed][0]:.2f} -> {found[name, seed][1]:.2f}" for seed in arguments.seeds]
        print(f"| {name} |", " | ".join(shown), "|")


if __name__ == "__main__":
    main()
