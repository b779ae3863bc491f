"""From arguments to a config, a trainer, a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine_core.config.assemble import check_inputs, load_config, plugins_for
from engine_core.errors import DataError
from engine_core.runs.checkpoint import Checkpoints
from engine_core.runs.checkpoint import problems as checkpoint_problems

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.config import EngineConfig
    from engine_core.runs.tracking import RunFolder


def read(
    files: Sequence[str],
    more: Sequence[str] | None = None,
    sets: Sequence[str] | None = None,
    steps: int | None = None,
    allow_code: bool = False,
) -> EngineConfig:
    """The validated config of these arguments; ``steps`` stands for ``--set run.steps=N``."""
    overrides = [*(sets or ()), *([] if steps is None else [f"run.steps={steps}"])]
    return load_config(*files, *(more or ()), overrides=overrides, allow_code=allow_code)


def read_run(folder: RunFolder, sets: list[str] | None, steps: int | None = None) -> EngineConfig:
    """The config that a run was last started or resumed with, and changes to it.

    The plugin files it names were allowed when it was started and are named by their full paths, so
    they are allowed again; their hashes are logged.
    """
    file = str(folder.config_file)
    config = read([file], sets=sets, steps=steps, allow_code=True)
    config._source.unread.clear()  # every key stands in this file: that some are not read is no news
    return config


def checkpoint_of(folder: RunFolder, step: int | None) -> Path:
    """The verified checkpoint of ``step``; default: the newest one that verifies."""
    checkpoints = Checkpoints(folder.checkpoints)
    if step is None:
        return checkpoints.latest()
    path, known = checkpoints.path(step), checkpoints.steps()
    if step not in known:
        listed = ", ".join(map(str, known)) or "none"
        raise DataError(
            f"--step {step}: {folder.path.name} has no checkpoint of that step. It has: {listed}."
        )
    if found := checkpoint_problems(path):
        raise DataError(
            f"--step {step}: checkpoint {path} is not usable: {found[0]}. Choose another of {known}."
        )
    return path


def trainer_of(config: EngineConfig) -> Any:
    """The trainer that the config names; what is missing on the disk is told now, all at once.

    Nothing is built before its ``setup`` or ``train``.
    """
    if problems := check_inputs(config):
        raise DataError("\n".join(problems))
    return plugins_for(config).resolve("trainers", config.trainer)(config)


def print_remarks(config: EngineConfig) -> None:
    """Print what a config says in vain or hardly means, one line each."""
    for kind, entries in (("warning", config.warnings), ("not read", config.unread)):
        for entry in entries:
            print(f"{kind}: {entry}")
