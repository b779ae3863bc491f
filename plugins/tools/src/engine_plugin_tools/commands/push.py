"""``engine push``: publish the model of a run on the Hugging Face hub."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine_core.cli.loading import chosen_checkpoint, read_run
from engine_core.cli.options import Sets, Step
from engine_core.cli.output import print_table
from engine_core.errors import ConfigError, EnvironmentProblem
from engine_core.runs.tracking import RunFolder
from engine_core.temporary_folder import TemporaryFolder
from engine_plugin_tools.commands.export import exported_role, write_model
from engine_plugin_tools.hub import CARD, Target

if TYPE_CHECKING:
    from engine_core.config import EngineConfig

ADAPTER = "adapter_config.json"
EXPORTED = ("config.json", ADAPTER)  # a folder with one of them is an exported model


def push(
    source: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Run, as for 'engine export', or a folder that it has written."),
    ],
    name: Annotated[str, typer.Argument(metavar="USER/NAME", help="The repository, made if missing.")],
    step: Step = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the LoRA adapter.")] = False,
    role: Annotated[
        str, typer.Option("--role", metavar="ROLE", help="The trained role to publish: actor or critic.")
    ] = "actor",
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private; one that is public is refused.")
    ] = False,
    branch: Annotated[
        str | None,
        typer.Option("--branch", metavar="BRANCH", help="A branch, made if missing; default: main."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make everything, contact nothing, list what would be uploaded.")
    ] = False,
    sets: Sets = None,
) -> None:
    """Publish the model of a run with a model card on the Hugging Face hub; prints the URL of the commit.

    Log in with 'hf auth login' or set HF_TOKEN. The model is written to a temporary folder first (TMPDIR). In a repository
    that exists, it replaces the weights in a new commit; other files stay.

    Example: engine push latest me/my-model --private --dry-run
    """
    target = Target(name, private, branch)
    if any((Path(source) / file).is_file() for file in EXPORTED):
        _refuse_options(
            source, {"--step": step, "--adapter": adapter, "--role": role != "actor", "--set": sets}
        )
        fill = partial(_take_exported, Path(source), name)
    else:
        run = RunFolder.open(source)
        config = read_run(run, sets)
        checkpoint = chosen_checkpoint(run, step, config)
        exported_role(checkpoint, config, adapter, role)
        fill = partial(_export, run, checkpoint, config, adapter, role, name, dry_run)
    if not dry_run:
        target.prepare()
    temporary = TemporaryFolder("push-")
    folder = Path(temporary.path) / "model"
    try:
        message = fill(folder)
        _name_base(folder)
        if dry_run:
            _print_content(folder, target)
        else:
            print(target.upload(folder, message))
    finally:
        temporary.remove()


def _take_exported(exported: Path, name: str, folder: Path) -> str:
    """Fill ``folder`` with an exported model under its name on the hub; return the message of the commit."""
    from engine_plugin_tools.model_card import rename_card  # imports the hub's client

    shutil.copytree(exported.resolve(), folder, copy_function=_take)
    rename_card(folder, name)
    return f"Upload {exported.resolve().name}"


def _export(
    run: RunFolder,
    checkpoint: Path,
    config: EngineConfig,
    adapter: bool,
    role: str,
    name: str,
    offline: bool,
    folder: Path,
) -> str:
    """Fill ``folder`` with the model of a checkpoint and its card; return the message of the commit.

    ``offline``: do not ask the hub for the license of the base model.

    Raises:
        EnvironmentProblem: a worker on another machine wrote the weights there.
    """
    from engine_plugin_tools.model_card import fetch_base_card, write_card

    step = write_model(folder, checkpoint, config, adapter, role)
    if not any(folder.glob("*.safetensors")):
        raise EnvironmentProblem(
            f"No weights arrived in {folder}: the role '{role}' runs on another machine. Set TMPDIR to a folder that "
            "all machines share, or use 'engine export RUN OUT --card' with such a folder, then 'engine push OUT'."
        )
    if not offline:
        fetch_base_card(config, role)
    write_card(folder, run, config, step, adapter, role, name)
    return f"Upload {run.path.name}, step {step}"


def _refuse_options(source: str, given: dict[str, object]) -> None:
    """Raise ``ConfigError`` if an option is given that only a run takes."""
    if names := [name for name, value in given.items() if value]:
        raise ConfigError(
            f"{', '.join(names)}: '{source}' is an exported model, which is uploaded as it is. Name a run instead."
        )


def _take(source: str, target: str) -> None:
    """Copy a file that may be changed before its upload; link to any other, which may be large."""
    if Path(source).name in (CARD, ADAPTER):
        shutil.copy(source, target)
    else:
        os.symlink(source, target)


def _name_base(folder: Path) -> None:
    """Replace the path of an adapter's base on this machine by the folder's name, and say that others lack it."""
    file = folder / ADAPTER
    if not file.is_file():
        return
    settings = json.loads(file.read_text("utf-8"))
    base = settings.get("base_model_name_or_path") or ""
    if Path(base).is_absolute():
        settings["base_model_name_or_path"] = Path(base).name
        file.write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
        print(
            f"engine: the adapter's base model is the folder '{Path(base).name}' on this machine. Others need it to use the "
            "adapter: push that model, too, or push this run without --adapter.",
            file=sys.stderr,
        )


def _print_content(folder: Path, target: Target) -> None:
    """Print where the folder would go, its files with their sizes, and the metadata of its card."""
    from huggingface_hub import ModelCard

    files = sorted(file for file in folder.rglob("*") if file.is_file())
    print(f"{target}, nothing is uploaded:")
    print_table([(str(file.relative_to(folder)), f"{file.stat().st_size:,} bytes") for file in files])
    if (folder / CARD).is_file():
        print(f"\n{ModelCard.load(folder / CARD).data.to_yaml()}")
