"""``engine train`` and ``engine resume``."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine_core.cli.loading import check_secrets, load_trainer, placing, print_unread, read, read_run
from engine_core.cli.options import AllowCode, Files, Run, Sets
from engine_core.errors import DataError, WorkerLost
from engine_core.redaction import without_secrets
from engine_core.runs.tracking import RunFolder

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.train.checkpointing import Resume

Steps = Annotated[
    int | None,
    typer.Option("--steps", metavar="N", help="Stop after step N of the run; the same as --set run.steps=N."),
]


def train(
    files: Files,
    sets: Sets = None,
    steps: Steps = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the derived numbers, build no model.")
    ] = False,
    allow_code: AllowCode = False,
) -> None:
    """Train as the run file says; prints the run folder at the end.

    With --dry-run it also prints which roles share which processes, and calls each reward on a made-up response.

    Example: engine train run.toml --set actor.optim.lr=2e-6 --steps 20
    """
    config = read(files, sets, steps, allow_code)
    if dry_run:
        with closing(load_trainer(config)) as trainer, placing(config):
            print("\n".join(trainer.plugins.require("parts", "dry_run")(trainer)))
            print_unread(config)
        return
    print(_to_the_end(config))


def resume(
    run: Run,
    steps: Steps = None,
    sets: Sets = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where the newest checkpoint is damaged; take no older one.")
    ] = False,
    force: Annotated[
        list[str] | None,
        typer.Option("--force", metavar="KEY", help="Continue although KEY changed; may be repeated."),
    ] = None,
) -> None:
    """Resume a run from its newest checkpoint that verifies; prints the run folder at the end.

    The config is that of the run's last attempt, changed by --set. Changes since the checkpoint are
    listed; a change that does not fit the checkpoint is refused.

    Example: engine resume latest --steps 24 --set actor.optim.lr=1e-5 --strict
    """
    folder = RunFolder.open(run)
    config = read_run(folder, sets, steps)
    check_secrets(config)
    from engine_core.train.checkpointing import Resume

    found = Resume.find(folder.path, strict, force or ())
    state = found.state
    done = state["step"]
    # A checkpoint written before its evaluation is not rewritten; the metrics line shows that its step is complete.
    complete = state["unfinished"] is None or any(line["step"] == done for line in folder.read_metrics())
    if config.run.steps is not None and done >= config.run.steps and complete:
        more = f"To continue: engine resume {run} --steps N, N over {done}."
        said = f"Nothing to do: step {done} is done, and run.steps is {config.run.steps}. {more}"
        print(said, file=sys.stderr)
    else:
        _to_the_end(config, found)
    print(folder.path)


def _to_the_end(config: EngineConfig, resume: Resume | None = None) -> Path:
    """Train to the end and return the run folder.

    After the loss of a worker, training resumes from the newest checkpoint, at most `max_restarts` times.

    Raises:
        WorkerLost: no restarts are left, or no checkpoint exists.
    """
    from engine_core.train.checkpointing import Resume

    print("Starting: libraries are loaded first.", file=sys.stderr, flush=True)
    left = getattr(config.runtime.options, "max_restarts", 0)
    while True:
        with closing(load_trainer(config)) as trainer:
            try:
                trainer.train(resume=resume)
                return trainer.folder.path
            except WorkerLost as lost:
                if not left or trainer.folder is None:
                    raise
                try:
                    newest = Resume.find(trainer.folder.path)
                except DataError:  # nothing was saved
                    raise lost from None
                if resume is None or newest.path != resume.path:  # else it keeps the keys of --force
                    resume = newest
                left -= 1
                again = f"resuming from {resume.path.name} with new workers ({left} restarts left)"
                print(without_secrets(f"engine: {lost}\nengine: {again}"), file=sys.stderr)
