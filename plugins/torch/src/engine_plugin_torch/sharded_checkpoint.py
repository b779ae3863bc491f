"""Checkpoints, exports and offloading of an engine whose model is sharded over ranks.

Each rank writes its part of a checkpoint in a thread while training continues. Rank 0 writes an export.

``PartSaver`` consumes: copies of the rank's state; waits for: the disk; unblocked by: the disk; produces: files, and a
future that is done with them.

``OffloadedBuffers`` frees device memory by whole storages: a library may keep several lists of views of the same large
buffers. Only the memory below the views is freed and restored, so every view stays valid.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from engine_core.runs import state_files
from engine_plugin_torch import state
from engine_plugin_torch.checkpoint import StateStore
from engine_plugin_torch.export import add_end_token, write_model
from engine_plugin_torch.shards import own_parts, shard_file, write_parts

if TYPE_CHECKING:
    from engine_plugin_torch.data_parallel import DataParallelEngine


class ShardedStore(StateStore):
    """The ``StateStore`` of an engine of several ranks.

    Attributes:
        saver: the writer of this rank's parts.
    """

    engine: DataParallelEngine  #: the engine of this part

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
                add_end_token(folder, (self.engine.context.live or {}).get("tokenizer"))
        except OSError as problem:
            error = problem
        for _ in stream:  # every rank gathers to the end, even if writing failed
            pass
        self.engine.ranks.share(error, f"Writing {folder}")

    def _write_model(self, folder: Path, stream: Iterator[tuple[str, Tensor]]) -> None:
        """Write the model's folder; called on rank 0."""
        write_model(folder, self.engine._plain, stream)
        if not hasattr(getattr(self.engine._plain, "config", None), "save_pretrained"):
            self._copy_config(folder)

    def close(self) -> None:
        """Wait for the checkpoint in progress."""
        self.saver.wait()


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


class OffloadedBuffers:
    """Blocks of device memory that are freed for a while, with or without a copy in host memory."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    def put(self, tensors: Iterable[Tensor], keep: bool = True) -> None:
        """Free the memory of these tensors. Memory that cannot be resized, such as that of a mapped file, stays.

        Args:
            tensors: tensors of any shape ``[D0, ...]``; views of one storage count once.
            keep: copy the content to host memory; without a copy, the tensors are restored as zeros.
        """
        seen = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if not size or not storage.resizable() or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            copy = None
            if keep:
                pinned = storage.device.type == "cuda"
                copy = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).copy_(_bytes(storage))
            self._kept.append((storage, size, copy))
        for storage, _, _ in self._kept:
            storage.resize_(0)

    def back(self) -> None:
        """Allocate the memory again and restore its content."""
        for storage, size, kept in self._kept:
            storage.resize_(size)
            held = _bytes(storage)
            held.zero_() if kept is None else held.copy_(kept, non_blocking=True)
        if any(storage.device.type == "cuda" for storage, _, _ in self._kept):
            torch.accelerator.synchronize()
        self._kept.clear()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class BufferStore(ShardedStore):
    """A ``ShardedStore`` of an engine whose library keeps views of large buffers: offloads whole storages."""

    def __init__(self, engine: DataParallelEngine) -> None:
        super().__init__(engine)
        self._offloaded: dict[str, OffloadedBuffers] = {}

    def _memory_of(self, part: str) -> list[Tensor]:
        """Return a part's tensors ``[D0, ...]`` on the device."""
        raise NotImplementedError

    def _move(self, parts: set[str], device: torch.device) -> None:
        """Offload parts to host memory, or bring offloaded parts back."""
        for part in parts:
            if part in self.asleep:
                self._offloaded.pop(part).back()
            else:
                self._offloaded[part] = OffloadedBuffers()
                self._offloaded[part].put(self._memory_of(part), keep=part != "gradients")
