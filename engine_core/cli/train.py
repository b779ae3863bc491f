"""``engine train`` and ``engine resume``."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from engine_core.cli.loading import read, read_run, trainer_of
from engine_core.cli.options import AllowCode, Files, More, Run, Sets
from engine_core.tracking import RunFolder

Steps = Annotated[
    int | None,
    typer.Option("--steps", metavar="N", help="Stop after step N of the run; the same as --set run.steps=N."),
]


def train(
    files: Files,
    more: More = None,
    sets: Sets = None,
    steps: Steps = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the derived numbers, build no model.")
    ] = False,
    allow_code: AllowCode = False,
) -> None:
    """Train as the run file says; prints the run folder at the end."""
    config = read(files, more, sets, steps, allow_code)
    with closing(trainer_of(config)) as trainer:
        if dry_run:
            trainer.load_inputs()
            print("\n".join([*trainer.derived(), *(f"not read: {entry}" for entry in config.unread)]))
            return
        trainer.train()
        print(trainer.folder.path)


def resume(run: Run, steps: Steps = None, sets: Sets = None, allow_code: AllowCode = False) -> None:
    """Go on with a run from its newest checkpoint that verifies; prints the run folder at the end."""
    folder = RunFolder.open(run)
    with closing(trainer_of(read_run(folder, sets, allow_code, steps))) as trainer:
        trainer.train(resume=folder.path)
        print(trainer.folder.path)
