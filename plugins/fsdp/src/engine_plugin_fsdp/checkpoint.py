"""Checkpoints and offloading of the FSDP engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine_core.runs import state_files
from engine_plugin_fsdp.host_memory import HostMemory
from engine_plugin_torch.sharded_checkpoint import ShardedStore

if TYPE_CHECKING:
    from engine_plugin_fsdp.engine import FSDPEngine
    from engine_plugin_torch.part_saver import Parts


class FSDPStore(ShardedStore):
    """A ``ShardedStore`` that keeps the optimizer's state in host memory if `cpu_offload` says so."""

    engine: FSDPEngine

    def __init__(self, engine: FSDPEngine) -> None:
        super().__init__(engine)
        self._host_memory = HostMemory()

    def _copied(self) -> tuple[dict[str, Parts], dict[str, Any]]:
        parts, scalars = super()._copied()
        if self.engine.loss_scale is not None:
            scalars["loss_scale"] = vars(self.engine.loss_scale)
        return parts, scalars

    def load(self, folder: Path) -> None:
        """Load this rank's part; a rank that the saving run did not have keeps its random state.

        If the number of ranks or of slices has changed, ranks with the same data continue with their leader's state.
        """
        super().load(folder)
        scalars = state_files.load_json(folder / state_files.STATE)
        if self.engine.loss_scale is not None and "loss_scale" in scalars:
            vars(self.engine.loss_scale).update(scalars["loss_scale"])
        if any(scalars.get(name) != value for name, value in self.engine.ranks.described.items()):
            self.engine.ranks.share_random_state()
        self.move_optimizer(self._optimizer_device)

    # -- device memory ------------------------------------------------------

    def _move(self, parts: set[str], device: torch.device) -> None:
        stays = self.engine.options.cpu_offload == "params" or self.engine.device.type == "cpu"
        if "weights" in parts and self.engine.root is not None and not stays:
            self.engine.root.to(device)  # FSDP follows its parameters
        if "optimizer" in parts:
            self.move_optimizer(device if device.type == "cpu" else self._optimizer_device)

    @property
    def _optimizer_device(self) -> torch.device:
        """Device of the optimizer's state between steps."""
        return self.engine.device if self.engine.options.cpu_offload == "none" else torch.device("cpu")

    @property
    def step_device(self) -> torch.device:
        """Device of the optimizer's state during a step."""
        return torch.device("cpu") if self.engine.options.cpu_offload == "params" else self.engine.device

    def move_optimizer(self, device: torch.device) -> None:
        """Move the optimizer's state to ``device``."""
        if self.engine.optimizer is not None:
            self._host_memory.move(self.engine.optimizer, device)
