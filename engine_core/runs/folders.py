"""The folder of a run: claimed at the start, and written to without ending the run when the disk is full.

A new run gets a new folder, or reuses the folder of a failed start in which nothing was trained. A start may be refused
late: by a worker, a row or an engine's options. Its folder then holds only its log and must not block the next
start of that name. Files of a step or of a user are never touched.

A write that fails on a full disk is kept and tried again before the next write. A checkpoint is written only if no
write is pending, so that a checkpoint never exists without the metrics and rollouts of its steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core import faults
from engine_core.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_core.config import EngineConfig

log = logging.getLogger("engine")

OURS = frozenset(
    ("config.resolved.toml", "config.origin.json", "env.json", "metrics.jsonl", "rollouts", "checkpoints", "logs",
     ".lock", "tensorboard", "wandb", "wandb_id.txt")
)  # fmt: skip
"""What a start writes before its first step."""
ATTEMPT = re.compile(r"attempt_(\d+)")
"""A folder of ``logs``."""


def folder_for(config: EngineConfig) -> tuple[Path, bool]:
    """Return the folder for a run that starts, and whether it is new; if not, lock it and call ``is_unused`` again.

    The folder is created by an atomic ``mkdir``, so two simultaneous starts never get the same new folder.

    Raises:
        ConfigError: the name is that of a used folder, or is not a folder name.
        EnvironmentProblem: the folder cannot be created.
    """
    root, name = Path(config.run.dir), config.run.name
    if name is not None and (name in ("", ".", "..", "latest") or Path(name).name != name):
        raise ConfigError(
            f"run.name: '{name}' is no name for a folder. Expected one like 'first-try', without '/'."
        )
    default = f"{_stem(config)}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [name] if name else [default, *(f"{default}-{i}" for i in range(2, 1000))]
    try:
        root.mkdir(parents=True, exist_ok=True)
        for candidate in names:
            with contextlib.suppress(FileExistsError):
                (root / candidate).mkdir()
                return (root / candidate).resolve(), True
    except OSError as error:
        raise EnvironmentProblem(
            f"run.dir: cannot make a run folder in '{root}': {error.strerror or error}. Set run.dir to a folder you may write to."
        ) from error
    if name is not None and is_unused(root / name):
        return (root / name).resolve(), False
    raise exists_already(root / names[0])


def is_unused(path: Path) -> bool:
    """Return whether a folder holds only what a start writes before its first step: no metrics, rollouts, checkpoints.

    Return False for a link, since its target may not be a run folder, and for a folder in which a run was resumed.
    """
    try:
        if path.is_symlink():
            return False
        names = {entry.name for entry in path.iterdir()}
        if names and ".lock" not in names:  # not a run folder
            return False
        metrics = path / "metrics.jsonl"
        return (
            names <= OURS
            and not (metrics.exists() and metrics.stat().st_size)
            and not any(_within(path / "checkpoints"))
            and not any(entry.is_file() for entry in _within(path / "rollouts"))
            and all(_is_log(entry) for entry in _within(path / "logs"))
        )
    except OSError:  # not a folder, or not readable
        return False


def _within(folder: Path) -> Iterator[Path]:
    """Return an iterator of everything below a folder; it is empty if the folder does not exist.

    Raises:
        OSError: the folder is a link or cannot be read.
    """
    if folder.is_symlink():
        raise NotADirectoryError(f"{folder} is a link")
    return folder.rglob("*")


def _is_log(entry: Path) -> bool:
    """Return whether a first start writes this entry below ``logs``; False for the config of a resumed attempt."""
    if entry.parent.name == "logs":
        return entry.is_dir() and ATTEMPT.fullmatch(entry.name) is not None
    return entry.suffix == ".log"


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: readers and other writers never see a part of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def exists_already(path: Path) -> ConfigError:
    """Return the error for a run name whose folder exists and cannot be reused."""
    started = any((path / "checkpoints").glob("step_*"))
    remedy = f"resume that run: engine resume {path}" if started else "delete it: it holds no checkpoint."
    return ConfigError(
        f"run.name: '{path.name}' exists already in {path.parent}, and a run folder is never overwritten. "
        f"Choose another name, or {remedy}"
    )


def _stem(config: EngineConfig) -> str:
    files: Sequence[Any] = getattr(config._source, "files", ())
    stem = Path(files[-1]).stem if files else "run"
    return re.sub(r"[^\w.-]+", "-", stem).strip(".-") or "run"


MOST = 16  # limit of pending large writes; lines of metrics are small and have no limit


class PendingWrites:
    """A queue of writes, done strictly in order; writes that fail with ``OSError`` stay pending."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, bool, Callable[[], Any]]] = deque()

    def do(self, what: str, write: Callable[[], Any], small: bool = False) -> None:
        """Write now, after the pending writes; a write that fails stays pending.

        Args:
            what: name of what is written, for messages: ``the metrics of step 7``.
            write: must leave nothing behind when it raises ``OSError``.
            small: whether the write does not count towards the limit ``MOST``.

        Raises:
            EnvironmentProblem: more than ``MOST`` large writes are pending. They are kept.
        """
        waited = len(self._waiting)
        self._waiting.append((what, small, write))
        try:
            self.flush()
        except OSError as error:
            if not waited:
                log.warning(
                    "%s cannot be written: %s. It is kept in memory and written when there is room; no checkpoint is "
                    "saved before.",
                    _capital(what),
                    error,
                )
            if sum(not small for _, small, _ in self._waiting) > MOST:
                raise EnvironmentProblem(self._refused(error)) from error

    def flush(self) -> None:
        """Do the pending writes.

        Raises:
            OSError: a write failed again; it stays pending.
            Exception: another error of a write, which is dropped because it would fail again.
        """
        count = len(self._waiting)
        while self._waiting:
            try:
                self._waiting[0][2]()
            except OSError:
                raise
            except Exception:
                self._waiting.popleft()
                raise
            self._waiting.popleft()
        if count > 1:
            log.info("What could not be written before is written now: %d writes.", count)

    def finish(self) -> None:
        """Do the pending writes for the last time.

        Raises:
            EnvironmentProblem: a write failed.
        """
        try:
            self.flush()
        except OSError as error:
            raise EnvironmentProblem(self._refused(error)) from error

    @property
    def waiting(self) -> list[str]:
        """Names of the pending writes, oldest first."""
        return [what for what, _, _ in self._waiting]

    def _refused(self, error: OSError) -> str:
        first, more = self.waiting[0], len(self.waiting) - 1
        others = f" and {more} more" if more else ""
        return (
            f"{_capital(first)}{others} could not be written: {error}. Free some space; `engine resume` continues the "
            "run from its last checkpoint."
        )


class LineFile:
    """A file of lines to which each line is appended as a whole or not at all.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, line: str) -> None:
        """Append a line; if that fails, restore the file's length.

        Raises:
            OSError: the line cannot be written.
        """
        data = line.encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            self._write(data[: len(data) // 2])
            faults.point("metrics.half_written")
            self._write(data[len(data) // 2 :])
        except BaseException:  # KeyboardInterrupt, too: the line is written again at the end
            self._file.truncate(end)
            raise

    def _write(self, data: bytes) -> None:
        while data:  # a nearly full disk takes only a part
            data = data[self._file.write(data) or 0 :]

    def sync(self) -> None:
        """Flush the file to the disk (fsync)."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
