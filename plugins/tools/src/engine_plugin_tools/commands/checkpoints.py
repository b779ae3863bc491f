"""The checkpoint that a command's option ``--step`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from engine_core.runs.checkpoint import Checkpoints

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
    return Checkpoints(folder.checkpoints).chosen(step)
