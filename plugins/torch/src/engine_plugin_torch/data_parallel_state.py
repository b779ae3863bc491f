"""Weights, checkpoints and exports of an engine whose model is spread over ranks.

What such engines share: weights are streamed whole and nobody holds all of them, each rank writes its part of a
checkpoint in a thread, the first rank writes an export. How a weight is made whole is the engine's own.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_plugin_torch import state
from engine_plugin_torch.data_parallel import DataParallel
from engine_plugin_torch.export import write_model
from engine_plugin_torch.part_saver import Parts, PartSaver
from engine_plugin_torch.shards import own_parts

if TYPE_CHECKING:
    from engine_plugin_torch.skeleton import Skeleton


class DataParallelState(DataParallel):
    """The part of an engine of several ranks that is about what it keeps and gives away.

    Attributes:
        skeleton: the model without weights; None where there is no such copy.
    """

    skeleton: Skeleton | None = None

    @functools.cached_property
    def _saver(self) -> PartSaver:
        return PartSaver()

    # -- weights ------------------------------------------------------------

    @property
    def _plain(self) -> nn.Module:
        """The module by which names are told: with whole shapes, where there is such a copy."""
        return self.module if self.skeleton is None else self.skeleton.module

    @abc.abstractmethod
    def _published(self, adapter: bool) -> Iterator[tuple[str, Tensor]]:
        """Whole weights under the names of ``save_pretrained``, on every rank: of the model, or the adapter's own. Collective."""

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that compute, whole, under the module's own names, on every rank. Collective.

        Raises:
            NotImplementedError: an engine that has no skeleton need not have this.
        """
        raise NotImplementedError

    def named_weights(self, to: str = "all", adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See ``TrainEngine``; for the leader alone the other ranks take part and get nothing."""
        self._need("weights")
        gets = to == "all" or self.ranks.rank == 0
        for name, tensor in self._published(adapter):
            if gets:
                yield name, tensor

    # -- a module to sample from --------------------------------------------

    @property
    def lends_whole(self) -> bool:
        """Not a module that there is no copy of to fill: its forward pass is collective."""
        return self.skeleton is not None or self.ranks.size == 1

    @property
    def _spread(self) -> bool:
        """Whether weights lie in parts, so that the module cannot be sampled from by each rank alone."""
        return self.skeleton is not None

    @contextlib.contextmanager
    def generation_module(self) -> Iterator[nn.Module]:
        """The whole model on every rank, in the type of the forward pass; its memory is free again after it.

        It gathers nothing while it is used, so that ranks may sample different numbers of tokens. Where weights are
        whole on every rank anyway, it is the module itself.
        """
        self._need("weights")
        if self.skeleton is None or not self._spread:
            with super().generation_module() as module:
                yield module
            return
        kept, computed = self.precision.param, self.precision.compute

        def cast() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._whole_weights():
                changes = kept != computed and tensor.is_floating_point()
                yield name, tensor.to(self.device, computed if changes else tensor.dtype)

        with self.skeleton.filled(cast()) as module, torch.no_grad():
            yield module

    # -- checkpoints --------------------------------------------------------

    def save(self, folder: Path) -> Future[None]:
        """Each rank writes its part in a thread, from a copy in host memory; see ``shards``.

        The future is this rank's own. Training may go on at once; a second save waits for the first.
        """
        self._saver.wait()
        parts, scalars = self._copied()
        own = {"random": self._random_now()}
        rank, size = self.ranks.rank, self.ranks.size
        return self._saver.write(folder, rank, size, parts, own, {**scalars, **self.ranks.described})

    def _copied(self) -> tuple[dict[str, Parts], dict[str, Any]]:
        """What this rank writes, in host memory, by kind of file; and plain values, the same on all ranks. Collective.

        Here: the parts of ``DTensor`` that lie on this rank.
        """
        tensors, scalars = self._state()
        del scalars["random"]  # each rank's own
        return {kind: own_parts(held, self.ranks.rank) for kind, held in tensors.items()}, scalars

    def load(self, folder: Path) -> None:
        """See ``TorchState``; a rank beyond those that saved keeps its random state."""
        self._saver.wait()
        super().load(folder)

    def export(self, folder: Path, adapter: bool = False) -> None:
        """A Hugging Face folder, written by the first rank a few tensors at a time: it never holds the whole model.

        Raises:
            OSError: it cannot be written; every rank raises, and a part of it may be there.
        """
        self._need("weights")
        error: Exception | None = None
        writes = self.ranks.rank == 0
        stream = iter(()) if adapter else self.named_weights(to="leader")
        try:
            if adapter:
                self._adapted().export(folder, writes)
            elif writes:
                self._write_model(folder, stream)
        except OSError as problem:
            error = problem
        for _ in stream:  # every rank gathers to the end, whatever happened to the file
            pass
        self.ranks.share(error, f"Writing {folder}")

    def _write_model(self, folder: Path, stream: Iterator[tuple[str, Tensor]]) -> None:
        """The first rank's work of an export."""
        write_model(folder, self._plain, stream)
        if not hasattr(getattr(self._plain, "config", None), "save_pretrained"):
            state.copy_config(self.config.path or self.model_config.path, self.model_config.override, folder)

    def close(self) -> None:
        self._saver.wait()
        super().close()
