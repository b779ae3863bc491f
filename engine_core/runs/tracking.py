"""The run folder, and the metrics and trackers of a run.

The files::

    runs/latest -> math-20260102-030405
    runs/math-20260102-030405/
      config.resolved.toml    every key with its value, of the newest start      config.origin.json  where each came from
      env.json                versions, plugins, git, seeds, hashes of the data, of the newest start
      metrics.jsonl           one line a step, always, written before the step counts as done
      rollouts/step_000012.parquet       checkpoints/       logs/attempt_0/  run.log, and the three of this start

A run folder is never shared and never overwritten. A resumed run continues in its folder: records of steps
after the checkpoint are dropped first, so each step is recorded once.

Left out on purpose: reading records back into training; state belongs in the checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from engine_core import faults
from engine_core.config.dump import as_data, dump_toml, origins
from engine_core.errors import DataError, EnvironmentProblem, did_you_mean
from engine_core.redaction import Redactor
from engine_core.runs.folders import ATTEMPT, exists_already, folder_for, is_unused, replace_text, writing
from engine_core.runs.machine import describe_environment
from engine_core.runs.rollout_files import read_rollouts, rollout_path, step_of, write_rollouts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_core.config import EngineConfig
    from engine_core.contracts.parts import TrackerThreads
    from engine_core.plugins.plugin_set import PluginSet

__all__ = ["RunFolder", "Tracker", "TrackerHub", "read_rollouts", "write_rollouts"]

logger = logging.getLogger("engine")
LOCK_TRIES = 3
LOCK_SECONDS = 0.05  # between two tries


class RunFolder:
    """A run on disk: ``create`` makes a new one, ``open`` finds an existing one, ``close`` unlocks it."""

    def __init__(self, path: Path) -> None:
        self.path = path  #: the folder
        self.redactor = Redactor.of()  #: removes secrets from what is written
        self.attempt = 0  #: number of this attempt, from 0
        self.start_step = 0  #: the step that this attempt resumed from, or 0
        self.metrics_file = path / "metrics.jsonl"  #: one line of JSON a step
        self.rollouts_dir = path / "rollouts"  #: the stored rollouts, a file a step
        self.checkpoints = path / "checkpoints"  #: the checkpoints, a folder each
        self.logs_dir = path / "logs"  #: the logs, a folder an attempt
        self._lock_file: TextIO | None = None

    @property
    def attempt_dir(self) -> Path:
        """Folder of this attempt's logs."""
        return self.logs_dir / f"attempt_{self.attempt}"

    @classmethod
    def create(cls, config: EngineConfig, plugins: PluginSet | None = None) -> RunFolder:
        """Make a new run folder where ``[run]`` says and describe the run in it.

        The default name is the name of the TOML file with date and time, with a suffix if two runs start in the same
        second. The folder of a failed start in which nothing was trained is reused: its log stays, and this attempt
        gets the next number.

        Raises:
            ConfigError: the name exists already or is not a folder name. Nothing was written.
            EnvironmentProblem: the folder cannot be created, or another process uses it.
        """
        path, new = folder_for(config)
        run = cls(path)
        try:
            locked = run.lock()
        except OSError as error:  # the folder of another user, which is only readable
            raise exists_already(path) from error
        if not new and not (locked and is_unused(path)):  # another process may use it by now
            run.close()
            raise exists_already(path)
        run.attempt = run._next_attempt()
        for folder in (run.rollouts_dir, run.checkpoints, run.attempt_dir):
            folder.mkdir(parents=True, exist_ok=True)
        run.metrics_file.touch()
        run._describe(config, plugins)
        run._become_latest()
        return run

    @classmethod
    def open(
        cls,
        path: str | Path,
        runs: str | Path = "runs",
    ) -> RunFolder:
        """Return an existing run.

        Args:
            path: path of the run, its name below ``runs``, or ``latest``.
            runs: folder of run folders.

        Raises:
            DataError: the run does not exist.
        """
        candidates = [Path(path), Path(runs) / path]
        found = [folder for folder in candidates if (folder / "config.resolved.toml").is_file()]
        if not found:
            folders = {Path(runs), Path(path).parent} - {Path()}
            names = [entry.parent.name for f in folders for entry in f.glob("*/config.resolved.toml")]
            names = names or [str(entry.parent) for entry in Path().glob("*/runs/*/config.resolved.toml")]
            raise DataError(
                f"No run at '{path}': neither that folder nor {candidates[1]} holds a config.resolved.toml."
                + did_you_mean(Path(path).name, names)
            )
        return cls(found[-1 if str(path) == "latest" else 0].resolve())

    @property
    def config_file(self) -> Path:
        """Config file that a resume starts from: that of the newest attempt that began training."""
        return self.path / "config.resolved.toml"

    def claim(self, step: int) -> None:
        """Begin a new attempt that resumes from ``step``: lock the folder and make a log folder.

        Raises:
            EnvironmentProblem: another process uses the folder. Nothing was changed.
        """
        self.lock()
        self.attempt, self.start_step = self._next_attempt(), step
        self.attempt_dir.mkdir(parents=True)

    def _next_attempt(self) -> int:
        return max(self._attempts(), default=-1) + 1

    def _attempts(self) -> list[int]:
        """Return the numbers of the attempts that have a log folder, in order; other folders are ignored."""
        found = (ATTEMPT.fullmatch(folder.name) for folder in self.logs_dir.glob("attempt_*"))
        return sorted(int(match[1]) for match in found if match)

    def rewind(
        self, step: int, config: EngineConfig, plugins: PluginSet | None = None, unfinished: bool = False
    ) -> None:
        """Drop the metrics and rollouts of later steps, which will be repeated, and describe the attempt.

        Args:
            step: step of the checkpoint that the attempt resumes from.
            config, plugins: of this attempt; the descriptions of the attempts before stay in their log folders.
            unfinished: whether to drop the metrics of ``step`` itself, too, because they will be written again.
        """
        last = step - unfinished
        kept = [json.dumps(line) + "\n" for line in self.read_metrics() if line["step"] <= last]
        replace_text(self.metrics_file, "".join(kept))
        faults.point("resume.in_rewind")
        for file in self.rollouts_dir.rglob("step_*.parquet"):
            if (step_of(file) or 0) > step:
                file.unlink()
        self._describe(config, plugins)
        self._become_latest()

    def lock(self) -> bool:
        """Lock the folder until ``close`` or the end of the process; return False if the file system has no locks.

        Raises:
            EnvironmentProblem: another process holds the lock.
            DataError: the lock is a link, and its target would be overwritten.
        """
        locked, lock = True, self.path / ".lock"
        if lock.is_symlink():
            raise DataError(f"{lock} is a link, which a run never makes. Delete it.")
        self._lock_file = lock.open("a+", encoding="utf-8")
        try:
            _lock(self._lock_file)
        except BlockingIOError as error:
            self._lock_file.seek(0)
            holder = self._lock_file.read() or "an unknown process"
            self.close()
            raise EnvironmentProblem(
                f"Run {self.path} is in use by {holder}. Wait for it to end or stop it; a run has one process at a time."
            ) from error
        except OSError as error:  # a network file system without locks
            message = "Cannot lock %s (%s): see to it that one process at a time works there."
            logger.warning(message, self.path, error)
            locked = False
        self._lock_file.truncate(0)
        self._lock_file.write(f"process {os.getpid()} on {platform.node()}")
        self._lock_file.flush()
        return locked

    def close(self) -> None:
        """Unlock the folder, so that other processes can resume the run."""
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def rollout_file(self, step: int) -> Path:
        """Return the file of the rollouts of ``step``."""
        return rollout_path(self.rollouts_dir, step)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl``, without lines that a crash has cut off or damaged."""
        if not self.metrics_file.is_file():
            logger.warning("%s is missing: the metrics of the steps so far are lost.", self.metrics_file)
            return []
        lines = self.metrics_file.read_text(encoding="utf-8", errors="replace").split("\n")
        found = [_metrics_line(line) for line in lines[:-1]]  # after the last newline: nothing, or a cut line
        if garbled := found.count(None):
            logger.warning("%d lines of %s cannot be read and are left out.", garbled, self.metrics_file)
        return [line for line in found if line is not None]

    def metrics_of(self, step: int) -> dict[str, Any]:
        """Return the metrics line of one step; {} if it has none."""
        return next((line for line in self.read_metrics() if line["step"] == step), {})

    def _describe(self, config: EngineConfig, plugins: PluginSet | None) -> None:
        """Write the config, the origin of each key and the environment into the attempt's log folder and the run folder."""
        self.redactor = Redactor.of(as_data(config))
        where = {key: origin for key, _, origin in origins(config)}
        environment = describe_environment(config, plugins)
        for name, text in {
            "env.json": json.dumps(environment, indent=2, ensure_ascii=False),
            "config.origin.json": json.dumps(where, indent=2, ensure_ascii=False),
            "config.resolved.toml": dump_toml(config),  # last: it makes the folder a run
        }.items():
            for folder in (self.attempt_dir, self.path):
                replace_text(folder / name, self.redactor(text))

    def _become_latest(self) -> None:
        """Point the link ``latest`` next to the folder to it, in one rename; leave a ``latest`` that is not a link."""
        latest, link = self.path.with_name("latest"), self.path.with_name(f".latest-{os.getpid()}")
        if latest.exists() and not latest.is_symlink():
            logger.warning("%s is no link, and was left alone: 'latest' does not mean this run.", latest)
            return
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(self.path.name)
            link.replace(latest)
        except OSError as error:  # a file system without links; only a convenience is lost
            logger.warning("Cannot link %s to this run: %s", latest, error)


class Tracker:
    """The base class of trackers, which receive metrics in addition to ``metrics.jsonl``.

    Each tracker runs in its own thread and does not delay training: a failing one is switched off. Example::

        class Printer(Tracker):
            def log(self, step, metrics):
                print(step, metrics["reward/mean"])

    Args:
        options: the tracker's table ``[tracking.NAME]``. The constructor runs in the controller; it may raise an
            ``EngineError`` to refuse a set-up that cannot work.
    """

    def __init__(self, options: Any = None) -> None:
        self.options = options  #: the tracker's table

    def start(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Open what the tracker needs.

        Args:
            run: the run folder; ``run.start_step`` is 0 or the step that the run resumed from.
            config: plain values without secrets.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step's metrics, which are finite numbers; an error that this raises switches the tracker off."""
        raise NotImplementedError

    def on_event(self, event: str, step: int, data: Mapping[str, Any]) -> None:
        """Receive an event of the run, such as ``rollouts_finished``: see ``engine_on_event``. Change nothing in ``data``.

        A tracker that is 16 calls behind receives no events until it has caught up, and no metrics at 10,000.
        """

    def close(self) -> None:
        """Write what is still buffered and release resources."""


class TrackerHub:
    """A dispatcher of each step's metrics, to ``metrics.jsonl`` and to the trackers of ``[tracking]`` (part ``trackers``).

    Nothing is opened before ``start``.

    Attributes:
        trackers: the threads of the trackers; None if the run has no tracker.

    Raises:
        EngineError: a tracker refuses its set-up.
    """

    def __init__(self, run: RunFolder, config: EngineConfig, plugins: PluginSet) -> None:
        self._path = run.metrics_file
        self._file: TextIO | None = None
        self.trackers: TrackerThreads | None = None
        if config.tracking.trackers:
            self.trackers = plugins.require("parts", "trackers")(run, config, plugins)

    def start(self) -> None:
        """Open ``metrics.jsonl`` and start the trackers; call this once the run folder is ready for the attempt."""
        self._file = self._path.open("a", encoding="utf-8")
        if self.trackers:
            self.trackers.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one line ``{"step": ..., "time": seconds since 1970, ...metrics}`` and send it to the trackers.

        JSON has no NaN: a value that is not finite is written as ``null``, is not sent to the
        trackers, and is counted in ``tracking/non_finite``.

        Raises:
            TypeError: a metric is not a number. Nothing was written.
            EnvironmentProblem: the line cannot be written, or the file was deleted.
        """
        assert self._file is not None, "start() comes before log()"
        if not self._path.exists():
            raise EnvironmentProblem(
                f"{self._path} was deleted during the run, which ends: its metrics would be lost."
            )
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        if bad := len(numbers) - len(finite):
            numbers["tracking/non_finite"] = finite["tracking/non_finite"] = bad
        line = {"step": step, "time": round(time.time(), 3)} | {n: finite.get(n) for n in numbers}
        text = json.dumps(line) + "\n"
        with writing(f"The metrics of step {step}"):
            self._file.write(text[: len(text) // 2])
            self._file.flush()
            faults.point("metrics.half_written")
            self._file.write(text[len(text) // 2 :])
            self._file.flush()
        if self.trackers:
            self.trackers.log(step, finite)

    def sync(self) -> None:
        """Flush ``metrics.jsonl`` to the disk; call this before each checkpoint."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close ``metrics.jsonl`` and the trackers, which get some seconds to finish."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # a full disk, on which ``log`` failed
            self._file.close()
        if self.trackers:
            self.trackers.close()


def _metrics_line(text: str) -> dict[str, Any] | None:
    """Parse one line of ``metrics.jsonl``; return None if it is damaged."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool | int):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"Metric '{name}' is {value!r} ({type(value).__name__}), not a number.") from None


def _lock(file: TextIO) -> None:
    """Lock a file; try again, since commands that list runs hold its lock for an instant.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file system has no locks.
    """
    for _ in range(LOCK_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(LOCK_SECONDS)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
