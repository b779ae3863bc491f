"""Checkpoints of a run: the state between two steps, when and how it is saved, and how a run resumes from it.

A ``ResumePoint`` is the state between two steps that no worker holds. It is taken after a step is trained and again
after the step is finished. While the next step has not updated weights, the workers' weights are those of the last
point, so a checkpoint of that point can still be written.

A resume finds the newest good checkpoint, refuses what does not fit, then restores. Nothing in the run folder changes
before the checkpoint is verified, compared and loaded.
"""

from __future__ import annotations

import logging
import platform
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from engine_core import faults
from engine_core.config.dump import ROLES, Difference, Verdict, as_data, check, differences
from engine_core.config.schedule import config_at
from engine_core.data import tokenizer_hash
from engine_core.errors import ConfigError, DataError, EnvironmentProblem
from engine_core.redaction import Redactor
from engine_core.runs.checkpoint import Best, Checkpoints, read_state
from engine_core.runs.state_files import FORMAT, STATE, load_json, reading
from engine_core.runs.tracking import RunFolder

if TYPE_CHECKING:
    from engine_core.train.run import TrainingRun

log = logging.getLogger("engine")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The controller's state after a step.

    ``unfinished`` holds the metrics of a step that is trained, but not evaluated and recorded yet.
    """

    step: int
    data: dict[str, Any]  # position of the data source
    trainer: dict[str, Any]  # the trainer's own state: statistics of rewards, adaptive coefficients
    random: tuple[Any, Any]  # states of Python's and numpy's global generators
    metrics: dict[str, float]  # of the step, for the choice of the best checkpoint
    unfinished: dict[str, float] | None = None
    files: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)  # state that is not JSON

    @classmethod
    def take(
        cls, run: TrainingRun, metrics: Mapping[str, float], unfinished: Mapping[str, float] | None = None
    ) -> ResumePoint:
        """Return the state of ``run`` now; its trained workers note their random states."""
        for name, role in run.roles(training=True).items():
            if role.kind == "train" and role.trainable and name in run.groups:  # not all outside of training
                run.groups[name].call("mark").result()
        return cls(
            run.step_done,
            run.source.state(),
            {"skipped_in_a_row": dict(run.skipped_in_a_row), **run.state()},
            (random.getstate(), numpy.random.get_state()),
            _plain(metrics),
            None if unfinished is None else _plain(unfinished),
            run.files(),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the state as plain values, for ``state.json``."""
        python, (name, keys, *rest) = self.random
        return {
            "data": self.data,
            "trainer": self.trainer,
            "random": {"python": python, "numpy": [name, keys.tolist(), *rest]},
            "metrics": self.metrics,
            "unfinished": self.unfinished,
        }


def seed_random(seed: int) -> None:
    """Seed Python's and numpy's global generators, which a user's rewards and stages may use."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set Python's and numpy's global generators to what ``ResumePoint.as_json`` wrote."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def _plain(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value if isinstance(value, int | float) else float(value) for name, value in metrics.items()
    }


PACKAGES = ("torch", "transformers", "numpy")  # a resume is bit for bit only with the same versions


class Saver:
    """A writer of the checkpoints of one run, as ``[checkpoint]`` says.

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
        """Return whether to save this step: by its number, by the clock, as the best so far, or as the last."""
        minutes = (time.monotonic() - self._saved_at) / 60
        return (
            bool(self.config.every_steps and step % self.config.every_steps == 0)
            or bool(self.config.every_minutes and minutes >= self.config.every_minutes)
            or (last and self.config.at_end)
            or self._is_best(metrics)
        )

    def save(self, point: ResumePoint, must: bool = False) -> Path | None:
        """Write the checkpoint of ``point``; the workers' weights must be those of its step.

        A save that fails leaves the older checkpoints as they are and logs a warning; the next step that
        saves tries again.

        Args:
            point: the state to save.
            must: whether a failure is an error, because no later save follows.

        Returns:
            The checkpoint's folder; None if the save failed.

        Raises:
            EnvironmentProblem: the save failed, and ``must`` is set or `checkpoint.max_failures` saves failed in a row.
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
        """Return the values that a resume compares: config, tokenizer, roles, plugins, versions."""
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
        log.warning("%s%s Training continues; the next save tries again.", what, kept)

    def _room(self) -> str:
        """Return a sentence on the free disk space and the size of the newest checkpoint."""
        folder = self.checkpoints.folder
        free = shutil.disk_usage(folder).free / 1e6
        older = self.checkpoints.steps()
        if not older:
            return f" {free:,.1f} MB are free."
        files = self.checkpoints.path(older[-1]).rglob("*")
        need = sum(file.stat().st_size for file in files if file.is_file()) / 1e6
        return f" A checkpoint needs {need:,.1f} MB, {free:,.1f} MB are free."


def versions() -> dict[str, str]:
    """Return the versions of Python and of ``PACKAGES``."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


TOKENIZER = "model.tokenizer"
KEYS: Mapping[str, Any] = {
    "step": int,
    "data": dict,
    "trainer": dict,
    "random": dict,
    "metrics": dict,
    "unfinished": dict | None,
    "config": dict,
    "tokenizer": str,
    "roles": list,
    "plugins": dict,
    "versions": dict,
}
"""What ``state.json`` holds."""


@dataclass(frozen=True)
class Resume:
    """A verified checkpoint to resume from.

    Args:
        path: its folder, below a run's ``checkpoints``.
        state: content of ``state.json``.
        force: keys that may differ from the checkpoint's config.
    """

    path: Path
    state: Mapping[str, Any]
    force: Sequence[str] = field(default=())

    @classmethod
    def find(cls, run: Path, strict: bool = False, force: Sequence[str] = ()) -> Resume:
        """Return the newest good checkpoint of a run folder.

        Raises:
            DataError: no good checkpoint exists; with ``strict``, the newest one is damaged.
        """
        return cls.at(Checkpoints(Path(run) / "checkpoints").latest(strict), force)

    @classmethod
    def at(cls, path: Path, force: Sequence[str] = ()) -> Resume:
        """Read the state of a verified checkpoint folder.

        Raises:
            DataError: another version wrote its state, or a value has the wrong type.
        """
        state = read_state(path)
        if missing := sorted(KEYS.keys() - state.keys()):
            raise DataError(f"{path} was written by another version: its state has no {', '.join(missing)}.")
        for key, kind in KEYS.items():
            if not isinstance(state[key], kind):
                raise DataError(
                    f"{path / STATE}: '{key}' is of the type {type(state[key]).__name__}, which no run writes. "
                    "Take another checkpoint."
                )
        return cls(path, state, tuple(force))

    def claim(self) -> RunFolder:
        """Lock the run's folder for a new attempt and return it; its metrics and rollouts are unchanged."""
        folder = RunFolder.open(self.path.parents[1])
        folder.claim(self.state["step"])
        return folder

    def compare(self, run: TrainingRun) -> None:
        """Log what changed since the checkpoint.

        Raises:
            ConfigError: a change does not fit the checkpoint and is not in ``force``.
        """
        now_data = as_data(run.config)
        now_config = Redactor.of(now_data).tree(now_data)
        found = differences(self.state["config"], now_config, self.state["roles"], self._movable(run))
        plugins = run.plugins.versions()
        here = {"plugins": plugins, "versions": versions()}
        for table, now in here.items():
            was = self.state[table]
            verdict: Verdict = "warned"
            found += [
                Difference(f"{table}.{name}", was.get(name, "absent"), now.get(name, "absent"), verdict)
                for name in dict.fromkeys([*was, *now])
                if was.get(name) != now.get(name)
            ]
        for difference in check(found, [key for key in self.force if key != TOKENIZER]):
            level = logging.INFO if difference.verdict == "allowed" else logging.WARNING
            log.log(level, "Changed since %s: %s", self.path.name, difference)

    def _movable(self, run: TrainingRun) -> list[str]:
        """Return the roles that another engine may take over: it reads the saved format, or nothing was saved."""
        found = []
        for role in set(ROLES) & set(self.state["roles"]):
            spec: Any = run.plugins.find("train_engines", run.config.role(role).backend)
            file = self.path / role / STATE
            common = file.is_file() and load_json(file).get("format") == FORMAT
            if not file.exists() or (common and spec and "common_checkpoints" in spec.capabilities):
                found.append(role)
        return found

    def check_inputs(self, run: TrainingRun) -> None:
        """Set the data to its position, before any model is built.

        Raises:
            ConfigError: the tokenizer differs, and `model.tokenizer` is not forced; or the checkpoint lacks a role
                of the run.
            DataError: the data files have other numbers of rows.
        """
        if self.state["tokenizer"] != tokenizer_hash(run.tokenizer) and TOKENIZER not in self.force:
            raise ConfigError(
                f"{TOKENIZER}: the tokenizer is not the one of {self.path.name}, so its tokens mean something else. "
                f"Bring its files back, or say that you mean it: --force {TOKENIZER}"
            )
        roles = run.roles(training=True)
        missing = [name for name, role in roles.items() if role.saved and not (self.path / name).is_dir()]
        if missing:
            raise ConfigError(
                f"{self.path.name} holds no role '{missing[0]}': the run had no such role until now, so it cannot be "
                "resumed. Start a new run: `engine export RUN OUT`, then train with model.path = 'OUT'."
            )
        run.source.load_state(self.state["data"])

    def go_on(self, run: TrainingRun) -> ResumePoint:
        """Restore the trainer, then drop what was recorded after the checkpoint, since those steps are repeated."""
        point = self.restore(run)
        log.info("Resumed from %s.", self.path)
        faults.point("resume.before_rewind")
        assert run.folder is not None
        run.folder.rewind(point.step, run.config, run.plugins, unfinished=point.unfinished is not None)
        return point

    def restore(self, run: TrainingRun) -> ResumePoint:
        """Load weights, optimizers, random states and the trainer's own state into a trainer that is set up."""
        for name, role in run.roles(training=True).items():
            if role.saved and name in run.groups:
                run.groups[name].call("load", folder=self.path / name).result()
        state = self.state
        with reading(self.path / STATE):
            run.load_state(state["trainer"], self.path)
            run.skipped_in_a_row = dict(state["trainer"]["skipped_in_a_row"])
            set_random_state(state["random"])
        run.step_done = run.step_now = state["step"]
        run.config_now = config_at(run.config, state["step"]) if state["step"] else run.config
        return ResumePoint.take(run, state["metrics"], state["unfinished"])
