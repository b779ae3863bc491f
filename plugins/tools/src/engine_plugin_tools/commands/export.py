"""``engine export``: write the trained model of a run as a Hugging Face folder."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine_core.cli.loading import read_run, trainer_of
from engine_core.cli.options import Run, Sets
from engine_core.cli.output import check_new
from engine_core.runs.tracking import RunFolder
from engine_plugin_tools.commands.checkpoints import Step, checkpoint_of

if TYPE_CHECKING:
    from engine_core.config import EngineConfig


def export(
    run: Run,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    step: Step = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the LoRA adapter, as a folder of peft.")
    ] = False,
    role: Annotated[
        str, typer.Option("--role", metavar="ROLE", help="The trained role to write: actor or critic.")
    ] = "actor",
    card: Annotated[
        bool, typer.Option("--card", help="Also write a model card, README.md, from the files of the run.")
    ] = False,
    sets: Sets = None,
) -> None:
    """Write the trained model of a run as a Hugging Face folder: weights, config, tokenizer.

    A LoRA adapter ([actor.lora]) is merged into the model; '--adapter' writes the adapter alone.

    Example: engine export latest my-model --step 24
    """
    check_new(out)
    folder = RunFolder.open(run)
    checkpoint, config = checkpoint_of(folder, step), read_run(folder, sets)
    if card:  # it imports the hub's client, and must not fail after the export
        from engine_plugin_tools.model_card import write_card
    done = write_model(out, checkpoint, config, adapter, role)
    if card:
        write_card(out, folder, config, done, adapter, role)
    print(out)


def write_model(out: Path, checkpoint: Path, config: EngineConfig, adapter: bool, role: str) -> int:
    """Write the model of a checkpoint into a new folder; return the checkpoint's step.

    Args:
        out: the folder.
        checkpoint: a verified checkpoint.
        config: config of its run.
        adapter: write the LoRA adapter alone.
        role: the trained role.
    """
    with closing(trainer_of(config)) as trainer:
        trainer.load_checkpoint(checkpoint, [] if role == "actor" else [role])
        trainer.export(out, adapter, role)
        return int(trainer.step_done)
