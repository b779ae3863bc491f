"""The writer of one rank's part of a checkpoint, in a thread while training continues.

consumes: copies of the rank's state; waits for: the disk; unblocked by: the disk; produces: files, and a future that is
done with them.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from engine_core.runs import state_files
from engine_plugin_torch import state
from engine_plugin_torch.shards import shard_file, write_parts

Parts: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors in host memory by name, and where each lies in its whole: ``{"shape": [97, 32], "at": [49, 0]}``."""


class PartSaver:
    """A writer of one checkpoint at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def wait(self) -> None:
        """Wait until the checkpoint in progress is written or has failed."""
        if self._thread is not None:
            self._thread.join()

    def write(
        self,
        folder: Path,
        rank: int,
        size: int,
        parts: Mapping[str, Parts],
        own: Mapping[str, Any],
        common: Mapping[str, Any],
    ) -> Future[None]:
        """Start to write; call ``wait`` for an earlier checkpoint first. Not collective.

        Args:
            folder: the checkpoint's folder; it is created if missing.
            rank: this rank.
            size: number of ranks.
            parts: parts by kind of file (``weights``, ``optimizer``). Their tensors must not change until the future
                is done.
            own: plain values of this rank.
            common: plain values of all ranks, written by rank 0.

        Returns:
            A future that is done when this rank's files are written. Its error is an ``OSError`` if the disk refuses;
            some files may exist then.
        """
        done: Future[None] = Future()
        own, common = copy.deepcopy((own, common))  # schedules and scales change while the thread writes

        def run() -> None:
            """Write this rank's files and complete the future."""
            try:  # all disk errors occur here, where no rank waits for another
                folder.mkdir(parents=True, exist_ok=True)
                for kind, (tensors, places) in parts.items():
                    write_parts(folder / shard_file(kind, rank, size), tensors, places)
                state_files.save_json(folder / state.rank_file(rank), own)
                if rank == 0:
                    state_files.save_json(folder / state_files.STATE, common)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._thread = threading.Thread(target=run, name="save-part", daemon=False)
        self._thread.start()
        return done
