"""The checkpoint that a command's option ``--step`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from engine_core.errors import DataError
from engine_core.runs.checkpoint import Checkpoints, problems

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.runs.tracking import RunFolder

Step = Annotated[
    int | None, typer.Option("--step", metavar="N", help="The checkpoint of this step; default: the newest.")
]


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
    if found := problems(path):
        raise DataError(
            f"--step {step}: checkpoint {path} is not usable: {found[0]}. Choose another of {known}."
        )
    return path
