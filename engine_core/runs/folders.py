"""The folder of a run: claimed at the start, and written to until the disk is full.

A new run gets a new folder, or reuses the folder of a failed start in which nothing was trained. A start may be refused
late: by a worker, a row or an engine's options. Its folder then holds only its log and must not block the next
start of that name. Files of a step or of a user are never touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_core.config import EngineConfig

ATTEMPT = re.compile(r"attempt_(\d+)")
"""A folder of ``logs``."""


def folder_for(config: EngineConfig) -> tuple[Path, bool]:
    """Return the folder for a run that starts, and whether it is new; if not, lock it and call ``is_unused`` again.

    The folder is created by an atomic ``mkdir``, so two simultaneous starts never get the same new folder.

    Raises:
        ConfigError: the name is that of a used folder.
        EnvironmentProblem: the folder cannot be created.
    """
    root, name = Path(config.run.dir), config.run.name
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


def writing_problem(path: Path) -> str | None:
    """Return why nothing can be written at ``path``, which need not exist; None if it can be written."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        return f"'{existing}' is no folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"you may not write to '{existing}'"


def is_unused(path: Path) -> bool:
    """Return whether a folder is empty, or of a start in which nothing was trained: no metrics, rollouts, checkpoints.

    Return False for a link, and if a start would write to the target of one.
    """
    if path.is_symlink() or not path.is_dir():
        return False
    if any(file.is_symlink() for file in (*path.iterdir(), *(path / "logs").rglob("*"))):
        return False
    metrics, files = path / "metrics.jsonl", (path / "rollouts", path / "checkpoints")
    trained = any(any(folder.rglob("*")) for folder in files) or (metrics.exists() and metrics.stat().st_size)
    return not any(path.iterdir()) or ((path / ".lock").is_file() and not trained)


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


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Wrap a write of a run's records.

    Args:
        what: what is written, the beginning of a sentence: ``The metrics of step 7``.

    Raises:
        EnvironmentProblem: the write failed; the disk may be full.
    """
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{what} could not be written: {error}. Free some space; `engine resume` continues the run from its last "
            "checkpoint."
        ) from error
