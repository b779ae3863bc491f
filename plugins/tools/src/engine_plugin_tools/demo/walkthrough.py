"""The steps of ``engine demo``, each an ``engine`` command that is printed and run in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from engine_core.cli.main import main
from engine_core.errors import EnvironmentProblem

MARKER = ".made_by_the_demo"


def engine(*arguments: str) -> None:
    """Print an ``engine`` command and run it.

    Raises:
        SystemExit: the command has failed, with its exit code.
    """
    print(f"\n$ engine {' '.join(arguments)}", flush=True)
    if code := main(list(arguments)):
        raise SystemExit(code)


def steps(number: int | None) -> list[str]:
    """Return the arguments that set the length of a run; none for the length in its file."""
    return [] if number is None else ["--steps", str(number)]


def fresh(folder: Path) -> None:
    """Make ``folder`` empty.

    Raises:
        EnvironmentProblem: it holds files of something else; they are left alone.
    """
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise EnvironmentProblem(
                f"'{folder}' exists and was not made by the demo. Move it away or choose another with --folder."
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


def accuracies(run: Path) -> list[float]:
    """Return the held-out accuracies of a run, in order of steps."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
