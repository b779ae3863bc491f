"""What the engine keeps and gives away: weights to others, checkpoints, exports, device memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine_core.engines import state
from engine_core.engines.data_parallel import DataParallel
from engine_core.engines.export import write_model
from engine_core.engines.shards import own_parts, shard_file, write_parts
from engine_core.engines.weights import own_weights, published_weights, take_weights, to_own_names
from engine_plugin_fsdp.export import gathered

if TYPE_CHECKING:
    from engine_core.engines.skeleton import Skeleton
    from engine_plugin_fsdp.host_memory import HostMemory
    from engine_plugin_fsdp.loss_scale import LossScale
    from engine_plugin_fsdp.options import FSDPOptions
    from engine_plugin_fsdp.ranks import Ranks


class Keeping(DataParallel):
    """The part of ``FSDPEngine`` that is about what it holds."""

    options: FSDPOptions
    ranks: Ranks
    root: nn.Module | None
    skeleton: Skeleton | None
    loss_scale: LossScale | None
    _host_memory: HostMemory

    # -- weights ------------------------------------------------------------

    @property
    def _plain(self) -> nn.Module:
        """The module by which names are told: not sharded, where there is such a copy."""
        return self.module if self.skeleton is None else self.skeleton.module

    def named_weights(self, to: str = "all", adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See ``TrainEngine``; for the leader alone the other ranks take part and get nothing."""
        self._need("weights")
        limit = self.options.weights_bucket_mb * 2**20
        if adapter:
            stream = gathered(self._adapted().tensors().items(), limit)
        else:
            stream = published_weights(self._plain, gathered(self._own(), limit))
        gets = to == "all" or self.ranks.rank == 0
        for name, tensor in stream:
            if gets:
                yield name, tensor

    def _own(self) -> Iterable[tuple[str, Tensor]]:
        """Sharded weights of the model, an adapter merged into it."""
        return own_weights(self.module).items() if self.adapter is None else self.adapter.merged()

    def load_named_weights(self, stream: Iterable[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """See ``TrainEngine``; every rank is given the whole stream and keeps its part."""
        self._need("weights")
        stream = to_own_names(self._plain, stream)
        if self.adapter is None:
            take_weights(self.module, stream, mix)
        else:
            self.adapter.take(stream, mix)
            self.adapter.base_identity()  # now, where all ranks are here

    @property
    def lends_whole(self) -> bool:
        """Not a module that a plugin has sharded: there is no copy of it to fill, and its forward pass is collective."""
        return self.skeleton is not None or self.ranks.size == 1

    @contextlib.contextmanager
    def generation_module(self) -> Iterator[nn.Module]:
        """The whole model on every rank, in the type of the forward pass; its memory is free again after it.

        It gathers nothing while it is used, so that ranks may sample different numbers of tokens.
        """
        self._need("weights")
        if self.skeleton is None:  # not sharded by this engine
            with super().generation_module() as module:
                yield module
            return
        own = gathered(own_weights(self.module).items(), self.options.weights_bucket_mb * 2**20)
        kept, computed = self.precision.param, self.precision.compute

        def cast() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in own:
                changes = kept != computed and tensor.is_floating_point()
                yield name, tensor.to(self.device, computed if changes else tensor.dtype)

        with self.skeleton.filled(cast()) as module, torch.no_grad():
            yield module

    # -- checkpoints --------------------------------------------------------

    def save(self, folder: Path) -> Future[None]:
        """Each rank writes its part in a thread, from a copy in host memory; see ``shards``.

        The future is this rank's own. Training may go on at once; a second save waits for the first.
        """
        self._wait_for_save()
        tensors, scalars = self._state()
        rank, size = self.ranks.rank, self.ranks.size
        parts = {kind: own_parts(held, rank) for kind, held in tensors.items()}
        mine = {"random": scalars.pop("random")}
        if self.loss_scale is not None:
            scalars["loss_scale"] = vars(self.loss_scale)
        mesh = self.ranks.described
        done: Future[None] = Future()

        def write() -> None:
            try:  # all that a disk can refuse: up to here ranks may wait for each other, from here on none does
                folder.mkdir(parents=True, exist_ok=True)
                for kind, (held, places) in parts.items():
                    write_parts(folder / shard_file(kind, rank, size), held, places)
                state.save_json(folder / state.rank_file(rank), mine)
                if rank == 0:
                    state.save_json(folder / state.STATE, {**scalars, **mesh})
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._saving = threading.Thread(target=write, name="fsdp-save", daemon=False)
        self._saving.start()
        return done

    def load(self, folder: Path) -> None:
        """See ``TorchState``; a rank beyond those that saved keeps its random state.

        On another mesh than that which saved, ranks that are given the same data go on with their leader's.
        """
        self._wait_for_save()
        super().load(folder)
        scalars = state.load_json(folder / state.STATE)
        if self.loss_scale is not None and "loss_scale" in scalars:
            vars(self.loss_scale).update(scalars["loss_scale"])
        if any(scalars.get(name) != value for name, value in self.ranks.described.items()):
            self.ranks.share_random_state()
        self._move_optimizer(self._optimizer_device)

    def _wait_for_save(self) -> None:
        thread = getattr(self, "_saving", None)
        if thread is not None:
            thread.join()

    def export(self, folder: Path, adapter: bool = False) -> None:
        """A Hugging Face folder, written by the first rank a few tensors at a time: it never holds the whole model.

        Raises:
            OSError: it cannot be written; every rank raises, and a part of it may be there.
        """
        self._need("weights")
        error: Exception | None = None
        writes = self.ranks.rank == 0
        if adapter:
            try:
                self._adapted().export(folder, writes)
            except OSError as problem:
                error = problem
        else:
            stream = self.named_weights(to="leader")
            try:
                if writes:
                    write_model(folder, self._plain, stream)
                    self._write_config(folder)
            except OSError as problem:
                error = problem
            for _ in stream:  # every rank gathers to the end, whatever happened to the file
                pass
        self.ranks.share(error, f"Writing {folder}")

    def _write_config(self, folder: Path) -> None:
        if not hasattr(getattr(self._plain, "config", None), "save_pretrained"):
            state.copy_config(self.config.path or self.model_config.path, self.model_config.override, folder)

    # -- device memory ------------------------------------------------------

    def _move(self, parts: set[str], device: torch.device) -> None:
        stays = self.options.cpu_offload == "params" or self.device.type == "cpu"
        if "weights" in parts and self.root is not None and not stays:
            self.root.to(device)  # FSDP follows its parameters
        if "optimizer" in parts:
            self._move_optimizer(device if device.type == "cpu" else self._optimizer_device)

    @property
    def _optimizer_device(self) -> torch.device:
        """Where the optimizer's state lies between steps."""
        return self.device if self.options.cpu_offload == "none" else torch.device("cpu")

    @property
    def _step_device(self) -> torch.device:
        """Where it lies while a step is taken."""
        return torch.device("cpu") if self.options.cpu_offload == "params" else self.device

    def _move_optimizer(self, device: torch.device) -> None:
        if self.optimizer is not None:
            self._host_memory.move(self.optimizer, device)

    def close(self) -> None:
        self._wait_for_save()
        super().close()
