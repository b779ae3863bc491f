"""One rank's part of a checkpoint, written in a thread while training goes on.

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
    """Writes one checkpoint at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def wait(self) -> None:
        """Until the checkpoint that is being written is written, or has failed."""
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
        """Begin to write; what went before must have been waited for. No collective.

        Args:
            folder: made where it is not there.
            rank: this one.
            size: how many there are.
            parts: by kind of file (``weights``, ``optimizer``). Nobody may change the tensors until the future is done.
            own: plain values of this rank.
            common: plain values of all ranks, written by the first.

        Returns:
            Done when this rank's files are there. Its error is an ``OSError`` where the disk refused; some files may
            be there.
        """
        done: Future[None] = Future()
        own, common = copy.deepcopy((own, common))  # schedules and scales go on while the thread writes

        def run() -> None:
            try:  # all that a disk can refuse: before this ranks may wait for each other, here none does
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
