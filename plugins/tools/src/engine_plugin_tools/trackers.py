"""Trackers, whose libraries are imported in the tracker's own thread, on first use."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Any

from engine_core.runs.tracking import RunFolder, Tracker
from engine_plugin_tools.packages import require_package
from engine_plugin_tools.tracker_options import TensorBoardOptions, WandbOptions

if TYPE_CHECKING:
    from collections.abc import Mapping


class TensorBoard(Tracker):
    """A tracker that writes event files below the run folder: ``tensorboard --logdir runs``."""

    def __init__(self, options: TensorBoardOptions | None = None) -> None:
        super().__init__(options or TensorBoardOptions())
        _require_package("tensorboard")

    def start(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Open the event files."""
        from torch.utils.tensorboard import SummaryWriter

        # Steps at or after purge_step that an earlier attempt wrote are hidden.
        purge_step = run.start_step + 1 if run.attempt else None
        self._writer = SummaryWriter(str(run.path / self.options.folder), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the event files."""
        self._writer.close()


class Wandb(Tracker):
    """A tracker for Weights & Biases. Its key comes from ``wandb login`` or ``WANDB_API_KEY``, never from the TOML."""

    def __init__(self, options: WandbOptions | None = None) -> None:
        super().__init__(options or WandbOptions())
        _require_package("wandb")

    def start(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Start the run, or resume it under its stored id."""
        import wandb

        id_file = (
            run.path / "wandb_id.txt"
        )  # a random text: with the name of the folder it makes the id, so that a copied run gets another
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8))
        self._run = wandb.init(
            project=self.options.project,
            entity=self.options.entity,
            mode=self.options.mode,
            name=run.path.name,
            id=hashlib.sha256(f"{id_file.read_text()} {run.path.name}".encode()).hexdigest()[:16],
            resume="allow",
            dir=str(run.path),
            config=dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _require_package(name: str) -> None:
    """Raise ``PluginError`` before the first step if the tracker's package, of the same name, is not installed."""
    require_package(name, name, f"Tracker '{name}'", ", or take it out of tracking.trackers")
