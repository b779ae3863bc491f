"""The run folder, and what is written about a run while it goes.

    runs/latest -> math-20260102-030405
    runs/math-20260102-030405/
      config.resolved.toml    every key with the value it had      config.origin.json  where each came from
      env.json                versions, plugins, git, seeds, hashes of the data
      metrics.jsonl           one line a step, always, written before the step counts as done
      rollouts/step_000012.parquet       checkpoints/       logs/attempt_0/rank_0.log       report.html

A run folder is never shared and never overwritten. A resumed run goes on in its folder: what was
written after the checkpoint is dropped first, so every step stands there once.

Left out on purpose: reading anything back into training; state belongs to the checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import math
import os
import platform
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from engine_core import faults
from engine_core.config.dump import as_data, dump_toml, origins
from engine_core.errors import DataError, EnvironmentProblem, did_you_mean
from engine_core.redaction import Redactor
from engine_core.runs.folders import (
    ATTEMPT,
    LineFile,
    PendingWrites,
    exists_already,
    folder_for,
    is_unused,
    replace_text,
)
from engine_core.runs.logs import FILE_ONLY
from engine_core.runs.machine import describe_environment
from engine_core.runs.rollout_files import read_rollouts, rollout_path, write_rollouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from engine_core.config import EngineConfig
    from engine_core.plugins.plugin_set import PluginSet

__all__ = ["RunFolder", "Tracker", "TrackerHub", "read_rollouts", "write_rollouts"]

logger = logging.getLogger("engine")


class RunFolder:
    """One run on disk: made by ``create``, found and continued by ``open``, locked until ``close``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.redactor = Redactor.of()  # removes secrets from what is written
        self.attempt = 0  # starts of this run before this one
        self.start_step = 0  # the step this attempt went on from
        self.metrics_file = path / "metrics.jsonl"
        self.rollouts_dir = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.logs_dir = path / "logs"
        self.pending = PendingWrites()  # what a full disk refused
        self._lock_file: TextIO | None = None

    @property
    def attempt_dir(self) -> Path:
        """Logs of this attempt."""
        return self.logs_dir / f"attempt_{self.attempt}"

    @classmethod
    def create(cls, config: EngineConfig, plugins: PluginSet | None = None) -> RunFolder:
        """Make a new run folder where ``[run]`` says and describe the run in it.

        The default name is that of the TOML with date and time, and is new even twice in a second. A folder that a start
        has left in which nothing was trained is taken over as it is: its log stays, this attempt has the next number.

        Raises:
            ConfigError: the name exists already or is no folder name. Nothing was written.
            EnvironmentProblem: the folder cannot be made, or another process works in it.
        """
        path, new = folder_for(config)
        run = cls(path)
        try:
            locked = run._lock()
        except OSError as error:  # of another user, who lets others read it
            raise exists_already(path) from error
        if not new and not (locked and is_unused(path)):  # somebody may have begun to work in it
            run.close()
            raise exists_already(path)
        run.attempt = run._next_attempt()
        for folder in (run.rollouts_dir, run.checkpoints, run.attempt_dir):
            folder.mkdir(parents=True, exist_ok=True)
        run.metrics_file.touch()
        run._describe(run.path, config, plugins)
        run._become_latest()
        return run

    @classmethod
    def open(
        cls,
        path: str | Path,
        runs: str | Path = "runs",
    ) -> RunFolder:
        """A run that exists: its path, its name below ``runs``, or ``latest``.

        Args:
            path: which run.
            runs: folder of run folders.

        Raises:
            DataError: there is no such run.
        """
        candidates = [Path(path), Path(runs) / path]
        found = [folder for folder in candidates if (folder / "config.resolved.toml").is_file()]
        if not found:
            folders = {Path(runs), Path(path).parent} - {Path()}
            names = [entry.parent.name for f in folders for entry in f.glob("*/config.resolved.toml")]
            raise DataError(
                f"No run at '{path}': neither that folder nor {candidates[1]} holds a config.resolved.toml."
                + did_you_mean(Path(path).name, names)
            )
        return cls(found[-1 if str(path) == "latest" else 0].resolve())

    @property
    def config_file(self) -> Path:
        """The config that the run goes on with: that of its newest attempt that came to training."""
        name = "config.resolved.toml"
        described = [self.logs_dir / f"attempt_{number}" / name for number in reversed(self._attempts())]
        return next(filter(Path.is_file, described), self.path / name)

    def claim(self, step: int) -> None:
        """Begin a new attempt, which goes on from ``step``: locked, with a log folder of its own.

        Raises:
            EnvironmentProblem: another process works on it. Nothing was changed.
        """
        self._lock()
        self.attempt, self.start_step = self._next_attempt(), step
        self.attempt_dir.mkdir(parents=True)

    def _next_attempt(self) -> int:
        return max(self._attempts(), default=-1) + 1

    def _attempts(self) -> list[int]:
        """Numbers of those that have a log folder, in order; what somebody else has put there is none."""
        found = (ATTEMPT.fullmatch(folder.name) for folder in self.logs_dir.glob("attempt_*"))
        return sorted(int(match[1]) for match in found if match)

    def rewind(
        self, step: int, config: EngineConfig, plugins: PluginSet | None = None, unfinished: bool = False
    ) -> None:
        """Drop the metrics and rollouts of later steps, since those are done again, and describe the attempt.

        Args:
            step: of the checkpoint that the attempt goes on from.
            config, plugins: what the attempt runs with, written to its log folder; the first stays.
            unfinished: the metrics of ``step`` itself are written again.
        """
        last = step - unfinished
        kept = [json.dumps(line) + "\n" for line in self.read_metrics() if line["step"] <= last]
        replace_text(self.metrics_file, "".join(kept))
        faults.point("resume.in_rewind")
        for file in self.rollouts_dir.rglob("step_*.parquet"):
            if int(file.stem.removeprefix("step_")) > step:
                file.unlink()
        self._describe(self.attempt_dir, config, plugins)
        self._become_latest()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Claim the folder for a while; an ``EnvironmentProblem`` where another process works on it."""
        self._lock()
        try:
            yield
        finally:
            self.close()

    @property
    def in_use(self) -> bool:
        """Whether a process works on it, as far as the file system tells; where that has no locks, it may be."""
        try:
            with (self.path / ".lock").open(encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def _lock(self) -> bool:
        """Claim the folder until ``close`` or the end of the process, however it ends; False where there are no locks."""
        locked = True
        self._lock_file = (self.path / ".lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        """Let other processes resume this run."""
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def rollout_file(self, step: int) -> Path:
        """Where the rollouts of ``step`` are written."""
        return rollout_path(self.rollouts_dir, step)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``; one that a crash cut off, or a loss of power left garbled, is left out."""
        if not self.metrics_file.is_file():
            logger.warning("%s is missing: the metrics of the steps so far are lost.", self.metrics_file)
            return []
        lines = self.metrics_file.read_text(encoding="utf-8", errors="replace").split("\n")
        found = [_metrics_line(line) for line in lines[:-1]]  # after the last newline: nothing, or a cut line
        if garbled := found.count(None):
            logger.warning("%d lines of %s cannot be read and are left out.", garbled, self.metrics_file)
        return [line for line in found if line is not None]

    def metrics_of(self, step: int) -> dict[str, Any]:
        """The line of one step; empty where it has none."""
        return next((line for line in self.read_metrics() if line["step"] == step), {})

    def _describe(self, folder: Path, config: EngineConfig, plugins: PluginSet | None) -> None:
        """Write what was asked for, where each key came from, and what the run depends on besides."""
        self.redactor = Redactor.of(as_data(config))
        where = {key: origin for key, _, origin in origins(config)}
        environment = describe_environment(config, plugins)
        for name, text in {
            "env.json": json.dumps(environment, indent=2, ensure_ascii=False),
            "config.origin.json": json.dumps(where, indent=2, ensure_ascii=False),
            "config.resolved.toml": dump_toml(config),  # last: it makes the folder a run
        }.items():
            replace_text(folder / name, self.redactor(text))

    def _become_latest(self) -> None:
        """Make ``latest`` beside the folder a link to it, in one rename; what is there and no link stays."""
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
    """Base of trackers: where metrics go besides ``metrics.jsonl``.

    Each tracker lives in a thread of its own and may take its time: a slow one loses steps, a
    failing one is switched off, and training notices neither. Example::

        class Printer(Tracker):
            def log(self, step, metrics):
                print(step, metrics["reward/mean"])

    Args:
        options: the tracker's table ``[tracking.NAME]``. The constructor runs in the controller and
            may refuse a set-up that cannot work by an ``EngineError``.
    """

    def __init__(self, options: Any = None) -> None:
        self.options = options

    def start(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Open what is needed. ``config`` is plain values without secrets; ``run.start_step`` is 0 or the resumed step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one step's metrics; only finite numbers arrive here."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is left."""


class _Feeder(threading.Thread):
    """Feeds one tracker.

    consumes: its queue of at most ``size`` steps; waits for: the next step; unblocked by: ``offer``
    or ``end``; produces: calls of the tracker, one after another. A daemon, so a stalled one cannot
    keep the process alive.
    """

    def __init__(self, name: str, tracker: Tracker, begin: Callable[[], None], size: int) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self.label, self.tracker, self._begin, self._size = name, tracker, begin, size
        self.failed = False
        self.dropped = 0  # steps not queued
        self._offered = 0  # written by the training thread alone
        self._taken = 0  # steps that the tracker took without an error; written by this thread alone
        self._queue: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()

    @property
    def pending(self) -> int:
        """Steps that it was offered and has not taken."""
        return self._offered - self._taken

    @property
    def missed(self) -> int:
        """Steps that are lost to this tracker by now: dropped, or queued when it failed."""
        return self.pending if self.failed else self.dropped

    def offer(self, step: int, metrics: dict[str, float]) -> None:
        """Queue one step without waiting; a full queue or a failed tracker drops it."""
        self._offered += 1
        if self.failed or self._queue.qsize() >= self._size:
            self.dropped += 1
        else:
            self._queue.put((step, metrics))

    def end(self) -> None:
        """Let it finish what is queued and close."""
        self._queue.put(None)

    def run(self) -> None:
        try:
            self._begin()
            while (item := self._queue.get()) is not None:
                self.tracker.log(*item)
                self._taken += 1
            self.tracker.close()
        except BaseException as error:  # a library may also end its thread by SystemExit
            self.failed = True
            logger.error("Tracker '%s' failed.", self.label, exc_info=True, extra=FILE_ONLY)
            logger.error(
                "Tracker '%s' failed and is off for the rest of the run; training goes on. %s: %s",
                self.label, type(error).__name__, error,
            )  # fmt: skip


class TrackerHub:
    """Sends each step's metrics to ``metrics.jsonl`` at once and to the trackers of ``[tracking]`` in their own time.

    When ``queue_size`` steps wait for a slow tracker, further ones are dropped for it. Nothing is opened
    before ``start``.

    Raises:
        EngineError: a tracker refuses its set-up, before any step.
    """

    def __init__(
        self, run: RunFolder, config: EngineConfig, plugins: PluginSet, queue_size: int = 256
    ) -> None:
        plain = run.redactor.tree(as_data(config))
        self._path = run.metrics_file
        self._file: LineFile | None = None
        self._pending = run.pending
        self._feeders: list[_Feeder] = []
        for name in config.tracking.trackers:
            tracker = plugins.resolve("trackers", name)(config.tracking.options.get(name))
            begin = functools.partial(tracker.start, run, plain)
            self._feeders.append(_Feeder(name, tracker, begin, queue_size))

    def start(self) -> None:
        """Open ``metrics.jsonl`` and the trackers, once the run folder is as the attempt begins it."""
        self._file = LineFile(self._path)
        for feeder in self._feeders:
            feeder.start()

    def counters(self) -> dict[str, float]:
        """``tracking/dropped`` (steps that some tracker missed) and ``tracking/failed`` (trackers off), where not 0."""
        counts = {
            "tracking/dropped": sum(feeder.missed for feeder in self._feeders),
            "tracking/failed": sum(feeder.failed for feeder in self._feeders),
        }
        return {name: count for name, count in counts.items() if count}

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one line ``{"step": ..., "time": seconds since 1970, ...metrics}`` and pass it on.

        JSON has no NaN: a value that is not finite is written as ``null``, is left out for the
        trackers, and is counted in ``tracking/non_finite``.

        A line that cannot be written waits, see ``folders.PendingWrites``.

        Raises:
            TypeError: a metric is not a number. Nothing was written.
        """
        assert self._file is not None, "start() comes before log()"
        numbers = {name: _number(name, value) for name, value in metrics.items()} | self.counters()
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        if bad := len(numbers) - len(finite):
            numbers["tracking/non_finite"] = finite["tracking/non_finite"] = bad
        line = {"step": step, "time": round(time.time(), 3)} | {n: finite.get(n) for n in numbers}
        write = functools.partial(self._file.append, json.dumps(line))
        self._pending.do(f"the metrics of step {step}", write, small=True)
        for feeder in self._feeders:
            feeder.offer(step, finite)

    def sync(self) -> None:
        """Write what waits and bring ``metrics.jsonl`` to the disk, so that no checkpoint outlives its metrics."""
        if self._file is not None:
            self._pending.flush()
            self._file.sync()

    def close(self, timeout: float = 5.0) -> None:
        """Give the trackers ``timeout`` seconds together to finish; what they missed is logged."""
        if self._file is None:
            return
        try:
            self._pending.finish()
        except EnvironmentProblem as error:
            logger.error("%s", error)
        self._file.close()
        for feeder in self._feeders:
            feeder.end()
        deadline = time.monotonic() + timeout
        for feeder in self._feeders:
            feeder.join(max(0.0, deadline - time.monotonic()))
            if feeder.pending:
                message = "Tracker '%s' missed %d steps; metrics.jsonl has them all."
                logger.warning(message, feeder.label, feeder.pending)
            elif feeder.is_alive():
                logger.warning("Tracker '%s' has not closed in time and is left behind.", feeder.label)


def _metrics_line(text: str) -> dict[str, Any] | None:
    """One line of ``metrics.jsonl``; None where it is none."""
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
