"""Checkpoints and exports of an engine whose model is spread over ranks.

Each rank writes its part of a checkpoint in a thread, the first rank writes an export.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_plugin_torch import state
from engine_plugin_torch.checkpoint import StateStore
from engine_plugin_torch.export import write_model
from engine_plugin_torch.part_saver import Parts, PartSaver
from engine_plugin_torch.shards import own_parts

if TYPE_CHECKING:
    from torch import Tensor

    from engine_plugin_torch.data_parallel import DataParallelEngine


class ShardedStore(StateStore):
    """``StateStore`` of an engine of several ranks.

    Attributes:
        saver: writes this rank's parts.
    """

    engine: DataParallelEngine

    def __init__(self, engine: DataParallelEngine) -> None:
        super().__init__(engine)
        self.saver = PartSaver()

    def save(self, folder: Path) -> Future[None]:
        """Each rank writes its part in a thread, from a copy in host memory; see ``shards``.

        The future is this rank's own. Training may go on at once; a second save waits for the first.
        """
        self.saver.wait()
        parts, scalars = self._copied()
        own = {"random": self._random_now()}
        rank, size = self.engine.ranks.rank, self.engine.ranks.size
        return self.saver.write(folder, rank, size, parts, own, {**scalars, **self.engine.ranks.described})

    def _copied(self) -> tuple[dict[str, Parts], dict[str, Any]]:
        """What this rank writes, in host memory, by kind of file; and plain values, the same on all ranks. Collective.

        Here: the parts of ``DTensor`` that lie on this rank.
        """
        tensors, scalars = self._state()
        del scalars["random"]  # each rank's own
        return {kind: own_parts(held, self.engine.ranks.rank) for kind, held in tensors.items()}, scalars

    def load(self, folder: Path) -> None:
        """See ``StateStore``; a rank beyond those that saved keeps its random state."""
        self.saver.wait()
        super().load(folder)

    def export(self, folder: Path, adapter: bool = False) -> None:
        """A Hugging Face folder, written by the first rank a few tensors at a time: it never holds the whole model.

        Raises:
            OSError: it cannot be written; every rank raises, and a part of it may be there.
        """
        self.need("weights")
        error: Exception | None = None
        writes = self.engine.ranks.rank == 0
        stream = iter(()) if adapter else self.engine.named_weights(to="leader")
        try:
            if adapter:
                self.engine._adapted().export(folder, writes)
            elif writes:
                self._write_model(folder, stream)
        except OSError as problem:
            error = problem
        for _ in stream:  # every rank gathers to the end, whatever happened to the file
            pass
        self.engine.ranks.share(error, f"Writing {folder}")

    def _write_model(self, folder: Path, stream: Iterator[tuple[str, Tensor]]) -> None:
        """The first rank's work of an export."""
        write_model(folder, self.engine._plain, stream)
        if not hasattr(getattr(self.engine._plain, "config", None), "save_pretrained"):
            state.copy_config(
                self.engine.config.path or self.engine.model_config.path,
                self.engine.model_config.override,
                folder,
            )

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        self.saver.wait()
