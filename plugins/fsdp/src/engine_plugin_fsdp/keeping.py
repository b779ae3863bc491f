"""What the engine keeps and gives away: weights to others, checkpoints, exports, device memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_core.contracts.weight_names import own_weights
from engine_core.runs import state_files
from engine_plugin_fsdp.export import gathered
from engine_plugin_torch.data_parallel_state import DataParallelState
from engine_plugin_torch.weights import published_weights, take_weights, to_own_names

if TYPE_CHECKING:
    from engine_plugin_fsdp.host_memory import HostMemory
    from engine_plugin_fsdp.options import FSDPOptions
    from engine_plugin_fsdp.ranks import Ranks
    from engine_plugin_torch.loss_scale import LossScale
    from engine_plugin_torch.part_saver import Parts


class Keeping(DataParallelState):
    """The part of ``FSDPEngine`` that is about what it holds."""

    options: FSDPOptions
    ranks: Ranks
    root: nn.Module | None
    loss_scale: LossScale | None
    _host_memory: HostMemory

    # -- weights ------------------------------------------------------------

    @property
    def _limit(self) -> int:
        """Bytes of whole weights that are gathered at one time."""
        return self.options.weights_bucket_mb * 2**20

    def _published(self, adapter: bool) -> Iterator[tuple[str, Tensor]]:
        if adapter:
            return gathered(self._adapted().tensors().items(), self._limit)
        return published_weights(self._plain, gathered(self._own(), self._limit))

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        return gathered(own_weights(self.module).items(), self._limit)

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

    # -- checkpoints --------------------------------------------------------

    def _copied(self) -> tuple[dict[str, Parts], dict[str, Any]]:
        parts, scalars = super()._copied()
        if self.loss_scale is not None:
            scalars["loss_scale"] = vars(self.loss_scale)
        return parts, scalars

    def load(self, folder: Path) -> None:
        """See ``TorchState``; a rank beyond those that saved keeps its random state.

        On another mesh than that which saved, ranks that are given the same data go on with their leader's.
        """
        super().load(folder)
        scalars = state_files.load_json(folder / state_files.STATE)
        if self.loss_scale is not None and "loss_scale" in scalars:
            vars(self.loss_scale).update(scalars["loss_scale"])
        if any(scalars.get(name) != value for name, value in self.ranks.described.items()):
            self.ranks.share_random_state()
        self._move_optimizer(self._optimizer_device)

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
