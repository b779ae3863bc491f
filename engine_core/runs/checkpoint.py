"""Checkpoints: written to a temporary folder, published by one rename, verified before they are read.

Layout of ``checkpoints/step_00000012/``: a folder for each role, written by its train engine; files of the trainer
(``stages/``: rollouts that stages keep); ``state.json`` (position in the data, random states, algorithm state,
versions); and ``manifest.json`` (size and SHA-256 of every other file), written last and synced. A folder without a
matching manifest is not a checkpoint, whatever its name. Nothing is ever overwritten. A checkpoint is renamed before
it is deleted, so that a half-deleted folder does not look like a checkpoint.

Left out on purpose: a file that points to the newest checkpoint. The folders' names are enough, and cannot dangle.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from engine_core import faults
from engine_core.config.models import CheckpointConfig
from engine_core.errors import DataError

log = logging.getLogger("engine")

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 2
MAX_MANIFEST_BYTES = 64 * 1024**2  # a manifest is far smaller
PICKLED = frozenset({".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".npy", ".npz"})
"""Suffixes of formats that can run code when read. We write none, so none belongs into a checkpoint."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: created if missing.
        config: ``[checkpoint]``, which says how many of the newest and of the best are kept after a save; default: its
            defaults.
        metrics_of: returns the metrics of a step, for a step that was evaluated after its checkpoint was written.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig | None = None,
        metrics_of: Callable[[int], Mapping[str, Any]] | None = None,
    ) -> None:
        self.folder, self.config = Path(folder), config or CheckpointConfig()
        self._metrics_of = metrics_of

    def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Write and publish the checkpoint of ``step``.

        Args:
            step: number of steps done.
            write: called with the folder to fill.
            state: JSON values.

        Returns:
            The published folder. If anything fails before the rename, older checkpoints are unchanged and the
            half-written folder is removed if possible.

        Raises:
            OSError: the checkpoint could not be written. Errors of ``write`` pass through.
        """
        final = self.path(step)
        if final.exists():
            if not problems(final):
                return final
            final.rename(self._aside(final, "broken"))
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self._aside(final, "partial")
        try:
            partial.mkdir()
            faults.point("checkpoint.begin")
            write(partial)
            faults.point("checkpoint.before_state")
            _write_json(partial / STATE, {"step": step, **state})
            faults.point("checkpoint.after_state")
            _write_manifest(partial, step)
            faults.point("checkpoint.before_publish")
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        faults.point("checkpoint.after_publish")
        _sync(self.folder)
        faults.point("checkpoint.before_prune")
        try:
            self.prune(self.config.keep_last, upto=step)
        except OSError as error:  # the new one is saved; the next save or `engine prune` tries again
            log.warning("Older checkpoints could not be deleted: %s.", error)
        return final

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of ``step``, which need not exist."""
        return self.folder / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Return the published steps, oldest first, verified or not."""
        names = [p.name for p in self.folder.glob("step_*") if p.is_dir()]
        return sorted(int(name.removeprefix("step_")) for name in names if name[5:].isdigit())

    def latest(self, strict: bool = False) -> Path:
        """Return the newest checkpoint that passes verification; log a warning for each newer damaged one.

        Args:
            strict: whether the newest checkpoint must pass.

        Raises:
            DataError: no checkpoint passes; with ``strict``, the newest one is damaged.
        """
        for step in reversed(self.steps()):
            found = problems(self.path(step))
            if not found:
                return self.path(step)
            message = f"Checkpoint {self.path(step)} is not usable: {found[0]}."
            if strict:
                raise DataError(f"{message} Without --strict an older one would be taken.")
            log.warning("%s Falling back to an older one.", message)
        raise DataError(
            f"No usable checkpoint in {self.folder}. Start again with `engine train`, under another run.name."
        )

    def chosen(self, step: int | None = None, best: bool = False) -> Path:
        """Return a verified checkpoint.

        Args:
            step: its step; None: the newest that passes verification.
            best: the one that `checkpoint.best_metric` ranks highest, instead.

        Raises:
            DataError: the run has no usable checkpoint of this step, or none with the metric.
        """
        known, run = self.steps(), self.folder.parent.name
        if best:
            ranked = self._best_of([each for each in known if not problems(self.path(each))])
            if not ranked:
                raise DataError(f"--step best: no checkpoint of {run} has a value of checkpoint.best_metric.")
            step = ranked[-1]
        if step is None:
            return self.latest()
        if step not in known:
            listed = ", ".join(map(str, known)) or "none"
            raise DataError(f"--step {step}: {run} has no checkpoint of that step. It has: {listed}.")
        if found := problems(self.path(step)):
            path = self.path(step)
            raise DataError(
                f"--step {step}: checkpoint {path} is not usable: {found[0]}. Choose another of {known}."
            )
        return self.path(step)

    def prune(
        self, keep: int, dry_run: bool = False, deep: bool = False, upto: int | None = None
    ) -> list[Path]:
        """Delete all verified checkpoints but the newest ``keep`` and the best; return their folders.

        Args:
            keep: number of checkpoints to keep in addition to the best.
            dry_run: only return the folders that would be deleted.
            deep: verify by hashes; else only by sizes.
            upto: ignore later steps. A resume skipped them as damaged, which sizes alone may not show.
        """
        steps = [step for step in self.steps() if upto is None or step <= upto]
        good = [step for step in steps if not problems(self.path(step), deep)]
        stay = {*good[-keep:], *self._best_of(good)}
        gone = [self.path(step) for step in good if step not in stay]
        for path in gone if not dry_run else ():
            aside = self._aside(path, "deleted")
            path.rename(aside)
            faults.point("checkpoint.in_prune")
            shutil.rmtree(aside)
        return gone

    def rank(self, metrics: Mapping[str, Any]) -> float | None:
        """Return a number that is higher for a better step; None if ``best_metric`` is not set, measured or finite."""
        value = metrics.get(self.config.best_metric or "")
        if value is None or not math.isfinite(value):
            return None
        return value if self.config.best_mode == "max" else -value

    def best_rank(self) -> float | None:
        """Return the rank of the best checkpoint; None if no checkpoint has the metric."""
        if self.config.best_metric is None:
            return None
        good = [step for step in self.steps() if not problems(self.path(step), deep=False)]
        return max((rank for step in good if (rank := self._rank(step)) is not None), default=None)

    def _best_of(self, steps: list[int]) -> list[int]:
        if self.config.best_metric is None:
            return []
        ranked = [(rank, step) for step in steps if (rank := self._rank(step)) is not None]
        return [step for _, step in sorted(ranked)[-self.config.keep_best :]]

    def _rank(self, step: int) -> float | None:
        state = read_state(self.path(step))
        if state.get("unfinished") is not None and self._metrics_of:
            return self.rank(self._metrics_of(step))
        return self.rank(state.get("metrics") or {})

    def _aside(self, final: Path, sort: str) -> Path:
        return self.folder / f".{final.name}.{sort}-{uuid.uuid4().hex[:8]}"


def read_state(path: Path) -> dict[str, Any]:
    """Return the JSON state of a checkpoint.

    Raises:
        DataError: the state cannot be read or is not a JSON object.
    """
    # it grows with the data: the order of a curriculum's rows is in it
    state = _read_json(path / STATE, most=None)
    if not isinstance(state, dict):
        raise DataError(f"{path / STATE} cannot be read: it is not the state of a checkpoint.")
    return state


def problems(path: Path, deep: bool = True) -> list[str]:
    """Return what is wrong with a checkpoint, a sentence each; [] if it passes verification.

    Only the manifest is parsed. A file that the manifest does not list is a problem, too.

    Args:
        path: the checkpoint's folder.
        deep: compare hashes; else only sizes.
    """
    if not (path / MANIFEST).is_file():
        return [f"{MANIFEST} is missing"]
    if (path / MANIFEST).is_symlink():
        return [f"{MANIFEST} is a link; a checkpoint holds files only"]
    manifest = _read_json(path / MANIFEST)
    if (files := _files_in(manifest)) is None:
        return [f"{MANIFEST} cannot be read"]
    if manifest.get("format") != FORMAT:
        return [f"{MANIFEST} has format {manifest.get('format')}, this version reads {FORMAT}"]
    step = manifest.get("step")
    if not isinstance(step, int) or (path.name.startswith("step_") and path.name != f"step_{step:08d}"):
        return [f"{MANIFEST} is of step {step}: the folder was renamed"]
    return [*_compare(path, files, deep), *_unlisted(path, files)]


def _files_in(manifest: Any) -> dict[str, Any] | None:
    """Return the files of a manifest with their entries; None if it does not have the form of a manifest."""
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        return None
    good = all(isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys() for entry in files.values())
    return files if good else None


def _unsafe(path: Path, name: str) -> str | None:
    """Return why a file of this name must not be opened; None if it may be."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\\" in name:
        return f"{name} points outside the checkpoint"
    if any((path / part).is_symlink() for part in (relative, *relative.parents)):
        return f"{name} is a link; a checkpoint holds files only"
    if relative.suffix.lower() in PICKLED:
        return f"{name} is of a format that can run code; a checkpoint of ours holds none"
    return None


def _compare(path: Path, files: Mapping[str, Any], deep: bool) -> list[str]:
    found = []
    for name, entry in files.items():
        file = path / name
        try:
            if unsafe := _unsafe(path, name):
                found.append(unsafe)
            elif not file.is_file():
                found.append(f"{name} is missing")
            elif file.stat().st_size != entry["bytes"]:
                found.append(f"{name} has {file.stat().st_size} bytes, expected {entry['bytes']}")
            elif deep and _sha256(file) != entry["sha256"]:
                found.append(f"{name} does not match its hash")
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
    return found


def _unlisted(path: Path, files: Mapping[str, Any]) -> list[str]:
    present = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()}
    return [f"{name} is not in the manifest" for name in sorted(present - files.keys() - {MANIFEST})]


def _read_json(path: Path, most: int | None = MAX_MANIFEST_BYTES) -> Any:
    """Return the value of a JSON file; None if it cannot be parsed or has more than ``most`` bytes."""
    try:
        if most is not None and path.stat().st_size > most:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _write_manifest(folder: Path, step: int) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    entries = {}
    for file in files:
        _sync(file)
        entries[str(file.relative_to(folder))] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    for sub in {file.parent for file in files}:
        _sync(sub)
    faults.point("checkpoint.before_manifest")
    _write_json(
        folder / MANIFEST, {"format": FORMAT, "step": step, "files": entries}, "checkpoint.in_manifest"
    )
    _sync(folder)


def _write_json(path: Path, value: Any, halfway: str | None = None) -> None:
    text = json.dumps(value, indent=1)  # a trainer's state keeps the order of its keys
    with path.open("w", encoding="utf-8") as file:
        file.write(text[: len(text) // 2])
        if halfway:
            file.flush()
            faults.point(halfway)
        file.write(text[len(text) // 2 :])
        file.flush()
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
