"""Loaders of the config, the trainer and the checkpoint that a command's arguments name."""

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
    sets: Sequence[str] | None = None,
    steps: int | None = None,
    allow_code: bool = False,
) -> EngineConfig:
    """Return the validated config of a command's arguments; ``steps`` means ``--set run.steps=N``."""
    overrides = [*(sets or ()), *([] if steps is None else [f"run.steps={steps}"])]
    return load_config(*files, overrides=overrides, allow_code=allow_code)


def read_run(folder: RunFolder, sets: list[str] | None, steps: int | None = None) -> EngineConfig:
    """Return the config that a run was last started or resumed with, changed by ``sets`` and ``steps``.

    The plugin files that the config names were allowed when the run was started, and they have absolute paths.
    They are therefore allowed again; their hashes are logged.
    """
    file = str(folder.config_file)
    config = read([file], sets=sets, steps=steps, allow_code=True)
    config._source.unread.clear()  # the file has every key, so a report of unread ones is useless
    return config


def checkpoint_of(folder: RunFolder, step: int | None) -> Path:
    """Return the verified checkpoint of ``step``; default: the newest one that verifies.

    Raises:
        DataError: the run has no usable checkpoint of this step.
    """
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
    """Return the trainer that the config names. Models are built later, in its ``setup`` or ``train``.

    Raises:
        DataError: every problem of the files and folders that the config names.
    """
    if problems := check_inputs(config):
        raise DataError("\n".join(problems))
    return plugins_for(config).resolve("trainers", config.trainer)(config)


def print_unread(config: EngineConfig) -> None:
    """Print the tables of the run file that the run does not read, one line each."""
    for entry in config.unread:
        print(f"not read: {entry}")
