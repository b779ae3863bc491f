"""The state of a run from the files of its folder: running, finished, failed or stopped, and how far it came."""

from __future__ import annotations

import fcntl
import json
import re
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from engine_core.runs.folders import ATTEMPT
from engine_core.runs.logs import clock

RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\w+) +\S+: (.*)")
PLANNED = re.compile(r" engine: (\d+) steps of ")
ENDED_AFTER = re.compile(r"The run ends after step (\d+)\.")
STOPPED = ("Stopped by", "The run was ended at once", "Ended by")
PART = 2**18
"""Bytes that are read of the beginning and of the end of a log, and of the end of the metrics."""


@dataclass(frozen=True)
class RunState:
    """The state of a run."""

    name: str
    folder: str
    state: str  #: "running", "finished", "failed" or "stopped"
    reason: str  #: why it failed or stopped, else empty
    step: int  #: steps done
    steps: int | None  #: steps planned, None if neither the log nor the config says
    reward: float | None  #: ``reward/mean`` of the last step
    started: float  #: Unix seconds of the first start
    updated: float  #: Unix seconds of the last step, or of the log before one
    attempts: int  #: starts and resumes
    warnings: tuple[str, ...]  #: warnings and errors of the newest attempt's log, the newest ones

    @property
    def age(self) -> str:
        """Time since ``updated`` in words."""
        return clock(max(0.0, time.time() - self.updated))


def run_state(path: Path) -> RunState:
    """Return the state of the run in a folder; its attempts before the newest one do not count."""
    attempts = sorted(
        (int(found[1]), folder)
        for folder in (path / "logs").glob("attempt_*")
        if (found := ATTEMPT.fullmatch(folder.name))
    )
    log = attempts[-1][1] / "run.log" if attempts else path / "run.log"
    records = [found.groups() for line in _lines(log) if (found := RECORD.fullmatch(line))]
    last = _last_metrics(path / "metrics.jsonl")
    planned = _planned(log) or _configured(path / "config.resolved.toml")
    step = last.get("step", 0)
    state, reason = _ending(records, step, planned)
    if _in_use(path / ".lock"):
        state, reason = "running", ""
    touched = (log if log.exists() else path).stat().st_mtime
    return RunState(
        name=path.name,
        folder=str(path),
        state=state,
        reason=reason,
        step=step,
        steps=planned,
        reward=last.get("reward/mean"),
        started=_started((attempts[0][1] if attempts else path) / "env.json") or touched,
        updated=last.get("time") or touched,
        attempts=len(attempts),
        warnings=tuple(message for level, message in records if level not in ("INFO", "DEBUG"))[-20:],
    )


def _ending(records: list[tuple[Any, ...]], step: int, planned: int | None) -> tuple[str, str]:
    """Return how an attempt ended by its log, and why if it did not finish."""
    reason = ""
    for level, message in records:
        if message.startswith("The run failed"):
            return "failed", reason or message
        if level == "CRITICAL":
            return "failed", message
        if message.startswith(STOPPED):
            return "stopped", message
        if level == "ERROR":
            reason = message
        if ENDED_AFTER.match(message):
            return "finished", ""
    if planned is not None and step >= planned:
        return "finished", ""
    return "stopped", "The log ends without a reason: the process may have been killed."


def _started(environment: Path) -> float | None:
    """Return when an attempt started by its description, which a copy of the folder keeps; None without one."""
    try:
        return datetime.fromisoformat(
            json.loads(environment.read_text(encoding="utf-8"))["started"]
        ).timestamp()
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _lines(path: Path) -> list[str]:
    """Return the lines at the end of a file; empty if it does not exist."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - PART))
        return file.read().decode("utf-8", "replace").split("\n")[size > PART :]


def _planned(log: Path) -> int | None:
    """Return the number of steps that a run logs at its start."""
    if not log.is_file():
        return None
    with log.open("rb") as file:
        found = PLANNED.search(file.read(PART).decode("utf-8", "replace"))
    return int(found[1]) if found else None


def _configured(config: Path) -> int | None:
    """Return ``run.steps``, for a log without records of level INFO."""
    try:
        steps = tomllib.loads(config.read_text(encoding="utf-8"))["run"]["steps"]
    except (OSError, ValueError, KeyError):
        return None
    return int(steps)


def _last_metrics(path: Path) -> Mapping[str, Any]:
    """Return the last whole line of the metrics; {} if none is near the end of the file."""
    for line in reversed(_lines(path)[:-1]):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            return found
    return {}


def _in_use(lock: Path) -> bool:
    """Return whether a process holds the lock of a run; False on a file system without locks."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
