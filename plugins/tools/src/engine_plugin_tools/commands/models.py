"""``engine generate``: sample responses to the prompts of the data and score them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from engine_core.cli.loading import load_trainer, read
from engine_core.cli.options import AllowCode, File, Sets
from engine_core.cli.output import check_new
from engine_core.errors import ConfigError
from engine_core.runs.rollout_files import write_rollouts


def generate(
    file: File,
    out: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="Where the rollouts go.")],
    sets: Sets = None,
    allow_code: AllowCode = False,
) -> None:
    """Sample responses to the prompts of the data, score them with the rewards, and write them.

    The file is what offline training reads; 'group_size' responses are sampled for each prompt. A trainer that samples
    nothing raises an error.

    Example: engine generate run.toml rollouts.parquet --set data.train=more.jsonl
    """
    if out.suffix != ".parquet":
        raise ConfigError(f"OUT '{out}' must end in .parquet: rollouts are written as Parquet.")
    check_new(out)
    config = read([file], sets=sets, allow_code=allow_code)
    with closing(load_trainer(config)) as trainer:
        if not hasattr(trainer, "generate"):
            raise ConfigError(
                f"trainer = '{config.trainer}' samples nothing. Use a file whose trainer has a [rollout] table."
            )
        trainer.setup()
        rollouts = trainer.generate(trainer.source.all())
        print(write_rollouts(out, 0, rollouts, trainer.about()))
