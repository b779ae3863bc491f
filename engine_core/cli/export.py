"""``engine export``: the trained model of a run as a Hugging Face folder."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from engine_core.cli.loading import checkpoint_of, read_run, trainer_of
from engine_core.cli.options import Run, Sets, Step
from engine_core.cli.output import check_new
from engine_core.runs.tracking import RunFolder


def export(
    run: Run,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    step: Step = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the LoRA adapter, as a folder of peft.")
    ] = False,
    sets: Sets = None,
) -> None:
    """Write the trained model of a run as a Hugging Face folder: weights, config, tokenizer.

    A LoRA adapter ([actor.lora]) is merged into the model; '--adapter' writes the adapter alone.
    """
    check_new(out)
    folder = RunFolder.open(run)
    checkpoint = checkpoint_of(folder, step)
    with closing(trainer_of(read_run(folder, sets))) as trainer:
        trainer.load_checkpoint(checkpoint)
        trainer.export(out, adapter)
    print(out)
