"""Checkpoints: written aside, published by one rename, verified before they are read.

Layout of ``checkpoints/step_00000012/``: a folder for each role that the train engine filled,
``state.json`` (position of the data, schedules, reward state, versions) and ``manifest.json``
(size and SHA-256 of every other file), written last. A folder without a manifest that matches is
not a checkpoint, whatever its name. Nothing is ever overwritten.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine_core.errors import DataError

log = logging.getLogger("engine")

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: made when missing.
        keep_last: how many verified ones stay; older ones go once a newer one is verified.
    """

    def __init__(self, folder: Path, keep_last: int = 2) -> None:
        self.folder, self.keep_last = Path(folder), keep_last

    def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Write and publish the checkpoint of ``step``.

        Args:
            step: steps done.
            write: fills the folder that it is given.
            state: JSON values.

        Returns:
            The published folder. When anything fails before the rename, what was there before is
            untouched and the half-written folder is removed where that is still possible.
        """
        final = self.path(step)
        if final.exists():
            if not problems(final):
                return final
            final.rename(self.folder / f".{final.name}.broken-{uuid.uuid4().hex[:8]}")
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".{final.name}.partial-{uuid.uuid4().hex[:8]}"
        try:
            partial.mkdir()
            write(partial)
            _write_json(partial / STATE, {"step": step, **state})
            _write_manifest(partial)
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync_folder(self.folder)
        self.prune(self.keep_last)
        return final

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` lies or would lie."""
        return self.folder / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Published steps, oldest first, verified or not."""
        names = [p.name for p in self.folder.glob("step_*") if p.is_dir()]
        return sorted(int(name.removeprefix("step_")) for name in names if name[5:].isdigit())

    def latest(self) -> Path:
        """The newest checkpoint that verifies; newer ones that do not are named in a warning.

        Raises:
            DataError: there is none.
        """
        for step in reversed(self.steps()):
            found = problems(self.path(step))
            if not found:
                return self.path(step)
            log.warning(
                "Checkpoint %s is not usable: %s. Falling back to an older one.",
                self.path(step).name,
                found[0],
            )
        raise DataError(
            f"No usable checkpoint in {self.folder}. Start again with `engine train`, under another run.name."
        )

    def leftovers(self) -> list[Path]:
        """What interrupted saves and replaced broken checkpoints left behind; nothing reads them."""
        return sorted(
            path for sort in ("partial", "broken") for path in self.folder.glob(f".step_*.{sort}-*")
        )

    def prune(self, keep: int) -> list[Path]:
        """Delete all but the newest ``keep`` verified checkpoints; returns what went."""
        good = [step for step in self.steps() if not problems(self.path(step), deep=False)]
        gone = []
        for step in good[:-keep]:
            shutil.rmtree(self.path(step))
            gone.append(self.path(step))
        return gone


def read_state(path: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint."""
    return json.loads((path / STATE).read_text())


def problems(path: Path, deep: bool = True) -> list[str]:
    """What is wrong with a checkpoint; empty when it can be trusted.

    Args:
        path: its folder.
        deep: compare hashes, not sizes alone.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
        return [f"{MANIFEST} cannot be read"]
    if manifest.get("format") != FORMAT:
        return [f"{MANIFEST} has format {manifest.get('format')}, this version reads {FORMAT}"]
    found = []
    for name, entry in files.items():
        file = path / name
        if file.is_symlink() or not file.resolve().is_relative_to(path.resolve()):
            found.append(f"{name} points outside the checkpoint")
        elif not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size != entry["bytes"]:
            found.append(f"{name} has {file.stat().st_size} bytes, expected {entry['bytes']}")
        elif deep and _sha256(file) != entry["sha256"]:
            found.append(f"{name} does not match its hash")
    return found


def _write_manifest(folder: Path) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    entries = {}
    for file in files:
        _sync_file(file)
        entries[str(file.relative_to(folder))] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    for sub in {file.parent for file in files}:
        _sync_folder(sub)
    _write_json(folder / MANIFEST, {"format": FORMAT, "files": entries})
    _sync_folder(folder)


def _write_json(path: Path, value: Any) -> None:
    with path.open("w") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
