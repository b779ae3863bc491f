"""The folder of a run that starts: a new one, or one that a start has left in which nothing was trained.

A start may be refused late: by a worker, by a row, by an engine's options. Its folder then holds its log and nothing
else that anybody needs, and must not be in the way of the next start of that name. What a step or somebody else has
left in it is never touched.
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
