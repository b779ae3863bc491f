"""Commands that use a model without training it: generate, eval."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from engine_core.cli.loading import checkpoint_of, read, read_run, trainer_of
from engine_core.cli.options import AllowCode, File, Json, Sets, Step
from engine_core.cli.output import check_new, print_metrics
from engine_core.errors import ConfigError
from engine_core.runs.tracking import RunFolder, write_rollouts


def generate(
    file: File,
    out: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="Where the rollouts go.")],
    sets: Sets = None,
    allow_code: AllowCode = False,
) -> None:
    """Sample responses to the prompts of the data, score them with the rewards, and write them.

    The file is what offline training reads; 'group_size' responses are sampled for each prompt. A trainer that samples
    nothing raises an error.
    """
    if out.suffix != ".parquet":
        raise ConfigError(f"OUT '{out}' must end in .parquet: rollouts are written as Parquet.")
    check_new(out)
    config = read([file], sets=sets, allow_code=allow_code)
    with closing(trainer_of(config)) as trainer:
        if not hasattr(trainer, "generate"):
            raise ConfigError(
                f"trainer = '{config.trainer}' samples nothing. Use a file whose trainer has a [rollout] table."
            )
        trainer.setup()
        rollouts = trainer.generate(trainer.source.all())
        print(write_rollouts(out, 0, rollouts, trainer.about()))


def evaluate(
    target: Annotated[
        str,
        typer.Argument(metavar="FILE|RUN", help="Run file, or a run: its newest checkpoint."),
    ],
    step: Step = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Write what was sampled there, one file a set: for 'engine compare'."
        ),
    ] = None,
    sets: Sets = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Score a model on the held-out files, as [eval] says: 'data.validation' and each [[eval.set]].

    --step with a run file, or --out with a trainer that samples nothing, raises an error.
    """
    if out is not None:
        check_new(out)
    if target.endswith(".toml") or Path(target).is_file():
        if step is not None:
            raise ConfigError(
                f"--step: '{target}' is a run file, and only a run has checkpoints. Name a run folder."
            )
        config, checkpoint = read([target], sets=sets, allow_code=allow_code), None
    else:
        folder = RunFolder.open(target)
        checkpoint = checkpoint_of(folder, step)
        config = read_run(folder, sets)
    with closing(trainer_of(config)) as trainer:
        if out is not None and not hasattr(trainer, "generate"):
            raise ConfigError(
                f"--out: trainer = '{config.trainer}' samples nothing, so there is nothing to write."
            )
        if checkpoint is not None:
            trainer.load_checkpoint(checkpoint)
        print_metrics(trainer.evaluate(out) if out is not None else trainer.evaluate(), as_json)
