"""Option tables of the trackers."""

from __future__ import annotations

from typing import Literal

from engine_core.specs import Options


class TensorBoardOptions(Options):
    """``[tracking.tensorboard]``: event files of TensorBoard. Needs ``pip install 'engine-plugin-tools[tensorboard]'``."""

    folder: str = "tensorboard"
    """Folder of the event files, below the run folder."""


class WandbOptions(Options):
    """``[tracking.wandb]``: a run in Weights & Biases. Needs ``pip install 'engine-plugin-tools[wandb]'``."""

    project: str = "engine"
    """Project name."""
    entity: str | None = None
    """Team or user; default: the logged-in user's default entity."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """``online``: send metrics at once. ``offline``: keep metrics in the run folder for ``wandb sync``. ``disabled``: drop metrics."""
