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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from engine_core.config.dump import ROLES, Difference, as_data, check, differences
from engine_core.data import tokenizer_hash
from engine_core.errors import ConfigError, DataError, EnvironmentProblem
from engine_core.plugins.metadata import installed, version
from engine_core.redaction import Redactor
from engine_core.runs.checkpoint import Checkpoints, read_state
from engine_core.runs.state_files import FORMAT, STATE, load_json
from engine_core.runs.tracking import RunFolder
from engine_core.specs import resolve

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.config.models import CheckpointConfig
    from engine_core.contracts.runtime import Role
    from engine_core.plugins.plugin_set import PluginSet

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


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers that JSON can hold."""
    return {
        name: value if isinstance(value, int | float) else float(value) for name, value in metrics.items()
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


def random_state() -> tuple[Any, Any]:
    """Return the states of Python's and numpy's global generators."""
    return random.getstate(), numpy.random.get_state()


PACKAGES = ("torch", "transformers", "numpy")  # a resume is bit for bit only with the same versions


class Saver:
    """A writer of the checkpoints of one run, as ``[checkpoint]`` says.

    Args:
        folder: the run folder.
        config: ``[checkpoint]``.
    """

    def __init__(self, folder: RunFolder, config: CheckpointConfig) -> None:
        self.config = config
        self.checkpoints = Checkpoints(folder.checkpoints, config, folder.metrics_of)
        self.failures = 0  # saves that failed in a row
        self._best = self.checkpoints.best_rank()
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

    def save(
        self,
        point: ResumePoint,
        write: Callable[[Path], None],
        about: Mapping[str, Any],
        must: bool = False,
    ) -> Path | None:
        """Write the checkpoint of ``point``; the workers' weights must be those of its step.

        A save that fails leaves the older checkpoints as they are and logs a warning; the next step that
        saves tries again.

        Args:
            point: the state to save.
            write: writes the workers' state into a folder.
            about: result of ``about``.
            must: whether a failure is an error, because no later save follows.

        Returns:
            The checkpoint's folder; None if the save failed.

        Raises:
            EnvironmentProblem: the save failed, and ``must`` is set or `checkpoint.max_failures` saves failed in a row.
        """
        self._saved_at = time.monotonic()

        def write_all(folder: Path) -> None:
            """Write the workers' state and the files of the point."""
            write(folder)
            for name, write_file in point.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                write_file(folder / name)

        try:
            path = self.checkpoints.save(point.step, write_all, {**point.as_json(), **about})
        except OSError as error:
            self._failed(point.step, error, must)
            return None
        self.failures = 0
        if self._is_best(point.metrics):
            self._best = self.checkpoints.rank(point.metrics)
        log.info("Checkpoint: %s", path)
        return path

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        rank = self.checkpoints.rank(metrics)
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


def about(config: EngineConfig, plugins: PluginSet, tokenizer: Any, roles: Iterable[str]) -> dict[str, Any]:
    """Return the values of a run that a resume compares."""
    data = as_data(config)
    return {
        "config": Redactor.of(data).tree(data),
        "tokenizer": tokenizer_hash(tokenizer),
        "roles": list(roles),
        "plugins": dict(plugins.versions()),
        "versions": versions(),
    }


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

    def compare(self, config: EngineConfig, plugins: PluginSet) -> None:
        """Log what changed since the checkpoint.

        Raises:
            ConfigError: a change does not fit the checkpoint and is not in ``force``, or an engine cannot read it.
        """
        data = as_data(config)
        now_config = Redactor.of(data).tree(data)
        found = differences(
            self.state["config"], now_config, self.state["roles"], self._movable(config, plugins)
        )
        # parts of a run, such as the workers of rewards, are loaded later: what is installed counts for them
        there = {offer.distribution.name: offer.distribution.version for offer in installed()}
        later = {name: there[name] for name in self.state["plugins"] if name in there}
        for table, now in {"plugins": later | plugins.versions(), "versions": versions()}.items():
            was = self.state[table]
            found += [
                Difference(f"{table}.{name}", was.get(name, "absent"), now.get(name, "absent"), "warned")
                for name in dict.fromkeys([*was, *now])
                if was.get(name) != now.get(name)
            ]
        for difference in check(found, [key for key in self.force if key != TOKENIZER]):
            level = logging.INFO if difference.verdict == "allowed" else logging.WARNING
            log.log(level, "Changed since %s: %s", self.path.name, difference)
        self._check_backends(config, plugins)

    def _movable(self, config: EngineConfig, plugins: PluginSet) -> list[str]:
        """Return the roles that another engine may take over: it reads the saved format, or nothing was saved."""
        found = []
        for role in set(ROLES) & set(self.state["roles"]):
            spec: Any = plugins.find("train_engines", config.role(role).backend)
            file = self.path / role / STATE
            common = file.is_file() and load_json(file).get("format") == FORMAT
            if not file.exists() or (common and spec and "common_checkpoints" in spec.capabilities):
                found.append(role)
        return found

    def _check_backends(self, config: EngineConfig, plugins: PluginSet) -> None:
        """Refuse an engine that cannot read what another engine saved.

        Raises:
            ConfigError: the engine's ``check_checkpoint`` found a problem.
        """
        for role in sorted(set(ROLES) & set(self.state["roles"])):
            table, now = self.state["config"].get(role), config.role(role).backend
            was = table.get("backend") if isinstance(table, dict) else None
            spec: Any = plugins.find("train_engines", now)
            if not isinstance(was, str) or was == now or spec is None or spec.check_checkpoint is None:
                continue
            if problem := resolve(spec.check_checkpoint)(self.path / role, was, now):
                raise ConfigError(f"{role}.backend: {problem}")

    def progress(self, config: EngineConfig) -> tuple[int, int]:
        """Return the finished steps, and the rows that they asked for; without a record, as many as ``config`` says."""
        step = int(self.state["step"])
        return step, int(self.state["trainer"].get("rows_done", step * config.data.prompts_per_step))

    def check_inputs(self, tokenizer: Any, roles: Mapping[str, Role]) -> None:
        """Refuse another tokenizer, and roles that the checkpoint lacks, before any model is built.

        Args:
            tokenizer: of the run.
            roles: of the run.

        Raises:
            ConfigError: the tokenizer differs, and `model.tokenizer` is not forced; or the checkpoint lacks a role
                of the run.
        """
        if self.state["tokenizer"] != tokenizer_hash(tokenizer) and TOKENIZER not in self.force:
            raise ConfigError(
                f"{TOKENIZER}: the tokenizer is not the one of {self.path.name}, so its tokens mean something else. "
                f"Bring its files back, or say that you mean it: --force {TOKENIZER}"
            )
        missing = [name for name, role in roles.items() if role.saved and not (self.path / name).is_dir()]
        if missing:
            raise ConfigError(
                f"{self.path.name} holds no role '{missing[0]}': the run had no such role until now, so it cannot be "
                "resumed. Start a new run: `engine export RUN OUT`, then train with model.path = 'OUT'."
            )
        if "ref" in roles and not roles["ref"].saved and (self.path / "ref").is_dir():
            raise ConfigError(
                f"algorithm.ref_refresh_steps: got 0, but the reference of {self.path.name} has followed the actor and would "
                "be that of its folder again. To keep it as it is, set the key to more steps than the run has."
            )
