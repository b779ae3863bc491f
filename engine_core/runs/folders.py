"""The folder of a run: claimed at the start, and written to without ending the run when the disk is full.

A new run has a new folder, or one that a start has left in which nothing was trained. A start may be refused late: by a
worker, by a row, by an engine's options. Its folder then holds its log alone and must not be in the way of the next
start of that name. What a step or a user has left in it is never touched.

A write that a full disk refuses is kept and tried again before the next one. A checkpoint is only written once no write
is pending, so that none outlives the metrics and rollouts of its steps.
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
    """The folder of a run that starts, and whether it was made now; if not, it is to be locked and looked at once more.

    ``mkdir`` decides, so two starts at once never make the same.

    Raises:
        ConfigError: the name exists already, with something in it, or is no folder name.
        EnvironmentProblem: the folder cannot be made.
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
    """Whether a folder holds what a start writes before its first step, and nothing else: no metrics, rollouts, checkpoints.

    A link is none of ours: what lies beside the folder that it leads to is somebody else's. Neither is one that was resumed.
    """
    try:
        if path.is_symlink():
            return False
        names = {entry.name for entry in path.iterdir()}
        if names and ".lock" not in names:  # somebody else's
            return False
        metrics = path / "metrics.jsonl"
        return (
            names <= OURS
            and not (metrics.exists() and metrics.stat().st_size)
            and not any(_within(path / "checkpoints"))
            and not any(entry.is_file() for entry in _within(path / "rollouts"))
            and all(_is_log(entry) for entry in _within(path / "logs"))
        )
    except OSError:  # it is no folder, or may not be read
        return False


def _within(folder: Path) -> Iterator[Path]:
    """What is in a folder and in those below; nothing where it is not there.

    Raises:
        OSError: it is a link, or no folder.
    """
    if folder.is_symlink():
        raise NotADirectoryError(f"{folder} is a link")
    return folder.rglob("*")


def _is_log(entry: Path) -> bool:
    """Whether it is what a start writes below ``logs``; a resumed one writes its config there, too."""
    if entry.parent.name == "logs":
        return entry.is_dir() and ATTEMPT.fullmatch(entry.name) is not None
    return entry.suffix == ".log"


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, also beside another process that writes it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def exists_already(path: Path) -> ConfigError:
    """What to say of a folder that is not taken over."""
    started = any((path / "checkpoints").glob("step_*"))
    way = f"go on with that run: engine resume {path}" if started else "delete it: it holds no checkpoint."
    return ConfigError(
        f"run.name: '{path.name}' exists already in {path.parent}, and a run folder is never overwritten. "
        f"Choose another name, or {way}"
    )


def _stem(config: EngineConfig) -> str:
    files: Sequence[Any] = getattr(config._source, "files", ())
    stem = Path(files[-1]).stem if files else "run"
    return re.sub(r"[^\w.-]+", "-", stem).strip(".-") or "run"


MOST = 16  # large writes that wait at one time; lines of metrics are small, and as many as there are


class PendingWrites:
    """Writes in the order in which they were asked for; none is made before the one that waits."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, bool, Callable[[], Any]]] = deque()

    def do(self, what: str, write: Callable[[], Any], small: bool = False) -> None:
        """Write now, after what waits; what fails waits.

        Args:
            what: the thing that is written, for messages: ``the metrics of step 7``.
            write: leaves nothing behind when it raises ``OSError``.
            small: any number may wait.

        Raises:
            EnvironmentProblem: too much waits. It is kept.
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
        """Write what waits.

        Raises:
            OSError: it still cannot be written; it waits on.
            Exception: what else a write raises; that one would fail again, and waits no more.
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
        """Write what waits, for there is no next time.

        Raises:
            EnvironmentProblem: it cannot be written.
        """
        try:
            self.flush()
        except OSError as error:
            raise EnvironmentProblem(self._refused(error)) from error

    @property
    def waiting(self) -> list[str]:
        """What waits."""
        return [what for what, _, _ in self._waiting]

    def _refused(self, error: OSError) -> str:
        first, more = self.waiting[0], len(self.waiting) - 1
        others = f" and {more} more" if more else ""
        return (
            f"{_capital(first)}{others} could not be written: {error}. Free some space; the run goes on from its last "
            "checkpoint with `engine resume`."
        )


class LineFile:
    """A file of lines, each of which is there whole or not at all.

    Args:
        path: of a file that is appended to.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, line: str) -> None:
        """Write a line at the end; when that fails the file is as it was.

        Raises:
            OSError: it cannot be written.
        """
        data = line.encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            self._write(data[: len(data) // 2])
            faults.point("metrics.half_written")
            self._write(data[len(data) // 2 :])
        except BaseException:  # a stop by the keyboard too: the line is tried again at the end
            self._file.truncate(end)
            raise

    def _write(self, data: bytes) -> None:
        while data:  # a disk that is nearly full takes some of it
            data = data[self._file.write(data) or 0 :]

    def sync(self) -> None:
        """Bring it to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
