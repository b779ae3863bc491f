"""Checkpoints and exports of an engine whose model is sharded over ranks.

Each rank writes its part of a checkpoint in a thread. Rank 0 writes an export.
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
    """The ``StateStore`` of an engine of several ranks.

    Attributes:
        saver: the writer of this rank's parts.
    """

    engine: DataParallelEngine

    def __init__(self, engine: DataParallelEngine) -> None:
        super().__init__(engine)
        self.saver = PartSaver()

    def save(self, folder: Path) -> Future[None]:
        """Write this rank's part in a thread, from a copy in host memory; see ``shards``.

        The future covers this rank only. Training may continue at once; a second save waits for the first.
        """
        self.saver.wait()
        parts, scalars = self._copied()
        own = {"random": self._random_now()}
        rank, size = self.engine.ranks.rank, self.engine.ranks.size
        return self.saver.write(folder, rank, size, parts, own, {**scalars, **self.engine.ranks.described})

    def _copied(self) -> tuple[dict[str, Parts], dict[str, Any]]:
        """Copy to host memory what this rank writes: parts by kind of file, and the common plain values. Collective.

        Here the parts are those of ``DTensor`` on this rank.
        """
        tensors, scalars = self._state()
        del scalars["random"]  # it differs by rank
        return {kind: own_parts(held, self.engine.ranks.rank) for kind, held in tensors.items()}, scalars

    def load(self, folder: Path) -> None:
        """Load this rank's part; a rank that the saving run did not have keeps its random state."""
        self.saver.wait()
        super().load(folder)

    def export(self, folder: Path, adapter: bool = False) -> None:
        """Write a Hugging Face folder on rank 0, a few tensors at a time: it never holds the whole model. Collective.

        Raises:
            OSError: the folder cannot be written; every rank raises, and some files may exist.
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
        for _ in stream:  # every rank gathers to the end, even if writing failed
            pass
        self.engine.ranks.share(error, f"Writing {folder}")

    def _write_model(self, folder: Path, stream: Iterator[tuple[str, Tensor]]) -> None:
        """Write the model's folder; called on rank 0."""
        write_model(folder, self.engine._plain, stream)
        if not hasattr(getattr(self.engine._plain, "config", None), "save_pretrained"):
            state.copy_config(
                self.engine.config.path or self.engine.model_config.path,
                self.engine.model_config.override,
                folder,
            )

    def close(self) -> None:
        """Wait for the checkpoint in progress."""
        self.saver.wait()
