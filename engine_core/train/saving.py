"""When a run is saved, what is written besides the workers' files, and what happens when that fails."""

from __future__ import annotations

import logging
import platform
import shutil
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core import faults
from engine_core.config.dump import as_data
from engine_core.data import tokenizer_hash
from engine_core.errors import EnvironmentProblem
from engine_core.runs.checkpoint import Best, Checkpoints

if TYPE_CHECKING:
    from engine_core.train.resume_point import ResumePoint
    from engine_core.train.run import TrainingRun

log = logging.getLogger("engine")

PACKAGES = ("torch", "transformers", "numpy")  # whose versions decide whether a resume is bit for bit


class Saver:
    """Writes the checkpoints of one run as ``[checkpoint]`` says.

    Args:
        run: set up for training, with its run folder.
    """

    def __init__(self, run: TrainingRun) -> None:
        assert run.folder is not None
        self.run, self.config = run, run.config.checkpoint
        best, metrics_of = Best.of(self.config), run.folder.metrics_of
        self.checkpoints = Checkpoints(run.folder.checkpoints, self.config.keep_last, best, metrics_of)
        self.failures = 0  # saves that failed in a row
        self._best = self.checkpoints.best_rank() if self.checkpoints.best else None
        self._saved_at = time.monotonic()

    def due(self, step: int, metrics: Mapping[str, float], last: bool) -> bool:
        """Whether this step is saved: by its number, by the clock, as the best so far, or as the last."""
        minutes = (time.monotonic() - self._saved_at) / 60
        return (
            bool(self.config.every_steps and step % self.config.every_steps == 0)
            or bool(self.config.every_minutes and minutes >= self.config.every_minutes)
            or (last and self.config.at_end)
            or self._is_best(metrics)
        )

    def save(self, point: ResumePoint, must: bool = False) -> Path | None:
        """Write the checkpoint of ``point``; the workers' weights are those of its step.

        A save that fails leaves the older checkpoints as they are and is a warning; the next step that
        saves tries again.

        Args:
            point: where the run stands.
            must: there is no next time.

        Raises:
            EnvironmentProblem: that many saves in a row failed (`checkpoint.max_failures`), or this one must not.
        """
        self._saved_at = time.monotonic()
        try:
            self.run.hub.sync()
            path = self.checkpoints.save(
                point.step, partial(self._write, point), {**point.as_json(), **self._about()}
            )
        except OSError as error:
            self._failed(point.step, error, must)
            return None
        self.failures = 0
        if self._is_best(point.metrics):
            assert self.checkpoints.best is not None
            self._best = self.checkpoints.best.rank(point.metrics)
        log.info("Checkpoint: %s", path)
        self.run.emit("checkpoint_saved", {"path": str(path)})
        return path

    def _write(self, point: ResumePoint, folder: Path) -> None:
        for name, role in self.run.roles(training=True).items():
            if role.saved:
                self.run.groups[name].call("save", folder=folder / name).result().result()
                faults.point("checkpoint.after_role")
        for name, write in point.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write(folder / name)

    def _about(self) -> dict[str, Any]:
        """What a resume compares with: config, tokenizer, roles, plugins, versions."""
        assert self.run.folder is not None
        return {
            "config": self.run.folder.redactor.tree(as_data(self.run.config)),
            "tokenizer": tokenizer_hash(self.run.tokenizer),
            "roles": list(self.run.roles(training=True)),
            "plugins": dict(self.run.plugins.versions()),
            "versions": versions(),
        }

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        rank = self.checkpoints.best.rank(metrics) if self.checkpoints.best else None
        return rank is not None and (self._best is None or rank > self._best)

    def _failed(self, step: int, error: OSError, must: bool) -> None:
        self.failures += 1
        what = f"Step {step} could not be saved: {error}.{self._room()}"
        older = self.checkpoints.steps()
        kept = (
            f" The checkpoint of step {older[-1]} is untouched." if older else " There is no checkpoint yet."
        )
        if must or self.failures >= self.config.max_failures:
            count = "" if must else f" ({self.failures} times in a row, checkpoint.max_failures)"
            raise EnvironmentProblem(f"{what}{kept}{count}") from error
        log.warning("%s%s Training goes on; the next save tries again.", what, kept)

    def _room(self) -> str:
        """Space that a checkpoint took and that is left."""
        folder = self.checkpoints.folder
        free = shutil.disk_usage(folder).free / 1e6
        older = self.checkpoints.steps()
        if not older:
            return f" {free:,.1f} MB are free."
        files = self.checkpoints.path(older[-1]).rglob("*")
        need = sum(file.stat().st_size for file in files if file.is_file()) / 1e6
        return f" A checkpoint needs {need:,.1f} MB, {free:,.1f} MB are free."


def versions() -> dict[str, str]:
    """Versions of what computes."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
