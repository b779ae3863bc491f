"""Weights through files: safetensors parts in a folder of the update, and the manifest last.

For processes that share nothing but a disk. Receivers start to read when the manifest exists, and so never read a
partial update. The folder holds at most two updates: the one being written and the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.contracts.weight_transport import WeightTransport, WeightUpdate
from engine_core.errors import ConfigError, DataError
from engine_core.runs.state_files import load_tensors, save_tensors
from engine_plugin_processes.buckets import grouped

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
POLL_SECONDS = 0.02


class Folder(WeightTransport):
    """The transport ``folder``: files in a folder that the sender and all receivers see."""

    root = Path()

    @classmethod
    def check(cls, options: Any, one_machine: bool) -> None:
        """Raise if no folder is named and the processes need not be on one machine.

        Raises:
            ConfigError: as above.
        """
        if not options.path and not one_machine:
            raise ConfigError(
                "rollout.folder.path: missing. The processes of this run need not be on one machine: name a folder that all see."
            )

    def open(self) -> Any:
        """Return the folder of the link; the sender makes it."""
        self.root = (
            Path(self.options.path or self.endpoint.shared_folder) / f"weights-{self.endpoint.link_id}"
        )
        if self.endpoint.index == 0:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        return str(self.root)

    def join(self, peers: Sequence[Any]) -> None:
        """Wait until this endpoint sees the sender's folder.

        Raises:
            ConfigError: it does not see the folder within the timeout.
        """
        self.root = Path(peers[0])
        deadline = time.monotonic() + self.options.timeout_seconds
        while not self.root.is_dir():
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"rollout.folder.path: {self.endpoint.names[self.endpoint.index]} does not see {self.root}, which "
                    f"{self.endpoint.names[0]} has made. Name a folder that both see."
                )
            time.sleep(POLL_SECONDS)

    def send(self, stream: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> int:
        """Write weights [D_1, D_2, ...] to the folder of the update and publish its manifest; return their bytes.

        Raises:
            Exception: the stream's own error, or one of the disk, after a manifest that reports it.
        """
        folder = self._of(update.number)
        folder.mkdir()
        parts, sent = [], 0
        try:
            for number, tensors in enumerate(grouped(stream)):
                file = folder / _part(number)
                save_tensors(file, dict(tensors))
                names = [name for name, _ in tensors]  # a safetensors file does not keep the order
                parts.append({"sum": _sum_of(file), "bytes": file.stat().st_size, "names": names})
                sent += sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        except BaseException as error:
            _publish(folder, {"break": f"{type(error).__name__}: {error}"})
            raise
        _publish(folder, {"update": update.number, "version": update.version, "parts": parts})
        # the update before the last was received before the last one began
        shutil.rmtree(self._of(update.number - 2), ignore_errors=True)
        return sent

    def receive(self, update: WeightUpdate) -> Generator[tuple[str, Tensor], None, None]:
        """Yield the weights [D_1, D_2, ...] of an update once its manifest exists.

        Raises:
            TrainingFailed: no manifest in time, the stream broke off, or a file is damaged.
        """
        manifest = self._manifest(update)
        if "break" in manifest:
            raise self.endpoint.failure(update, f"The stream of weights broke off: {manifest['break']}.")
        if (manifest.get("update"), manifest.get("version")) != (update.number, update.version):
            raise self.endpoint.failure(update, f"{self._of(update.number) / MANIFEST} is of another update.")
        for number, part in enumerate(manifest["parts"]):
            file = self._of(update.number) / _part(number)
            if not file.is_file() or _sum_of(file) != part["sum"]:
                raise self.endpoint.failure(
                    update,
                    f"{file} is missing or damaged: its checksum is not the one that was written. The update is refused, and "
                    "nothing is sampled until a whole one came. Look at the disk.",
                )
            try:
                tensors = load_tensors(file)
            except DataError as error:
                raise self.endpoint.failure(update, str(error)) from error
            yield from ((name, tensors[name]) for name in part["names"])

    def close(self) -> None:
        """Remove the folder of the link, at the sender."""
        if self.endpoint.index == 0 and self.root != Path():
            shutil.rmtree(self.root, ignore_errors=True)

    def _of(self, number: int) -> Path:
        return self.root / f"update-{number:08d}"

    def _manifest(self, update: WeightUpdate) -> dict[str, Any]:
        file = self._of(update.number) / MANIFEST
        deadline = time.monotonic() + self.options.timeout_seconds
        while not file.is_file():
            if time.monotonic() > deadline:
                raise self.endpoint.timeout(update, f"{file} was not there", self.options.timeout_seconds)
            time.sleep(POLL_SECONDS)
        try:
            found = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise self.endpoint.failure(update, f"{file} is no manifest: {error}.") from error
        return found if isinstance(found, dict) else {}


def _part(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def _sum_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


def _publish(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest atomically, after all the files that it names."""
    made = folder / f"{MANIFEST}.partial"
    made.write_text(json.dumps(manifest), encoding="utf-8")
    os.replace(made, folder / MANIFEST)
