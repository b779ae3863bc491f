"""``engine train`` and ``engine resume``."""

from __future__ import annotations

import sys
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


def resume(
    run: Run,
    steps: Steps = None,
    sets: Sets = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where the newest checkpoint is damaged; take no older one.")
    ] = False,
    force: Annotated[
        list[str] | None,
        typer.Option(
            "--force", metavar="KEY", help="Go on though KEY changed and would be refused. Repeat it."
        ),
    ] = None,
) -> None:
    """Go on with a run from its newest checkpoint that verifies; prints the run folder at the end.

    The config is that of its last attempt, with --set on top. What changed since the checkpoint is
    listed; what would not fit is refused.
    """
    from engine_core.trainers.resuming import Resume

    folder = RunFolder.open(run)
    config = read_run(folder, sets, steps)
    found = Resume.find(folder.path, strict, force or ())
    state = found.state
    done = state["step"]
    # A checkpoint from before its step's evaluation stays as it is; the step's line says that it is complete.
    complete = state["unfinished"] is None or any(line["step"] == done for line in folder.read_metrics())
    if config.run.steps is not None and done >= config.run.steps and complete:
        more = f"To go on: engine resume {run} --steps N, N over {done}."
        said = f"Nothing to do: step {done} is done, and run.steps is {config.run.steps}. {more}"
        print(said, file=sys.stderr)
    else:
        with closing(trainer_of(config)) as trainer:
            trainer.train(resume=found)
    print(folder.path)
