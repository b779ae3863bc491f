"""The builder of a sharded model: rank 0 reads the folder, and the other ranks get their parts tensor by tensor.

The other ranks build the same module with parameters on ``meta``, so only rank 0 ever holds the whole model.
Where a plugin builds the module, every rank holds it whole until it is sharded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine_core.contracts.weight_names import own_weights
from engine_core.errors import DataError
from engine_core.local.device_memory import device_bytes
from engine_core.model_config import has_no_weights
from engine_plugin_torch.build import ModelBuilder
from engine_plugin_torch.folder_parts import FolderParts
from engine_plugin_torch.model_loading import CPU, DRAWS, cast_parameters
from engine_plugin_torch.sharded import here, span, write
from engine_plugin_torch.skeleton import blank_model

if TYPE_CHECKING:
    from engine_core.config import ModelConfig
    from engine_plugin_fsdp.engine import FSDPEngine

INSTEAD = "Set loading = 'broadcast', which reads it on one rank."


class FSDPBuilder(ModelBuilder):
    """The ``ModelBuilder`` of a model that is read on the CPU, or drawn on the device, and sharded from there.

    Attributes:
        first_reads: only rank 0 reads the model.
        each_reads: each rank reads its part.
    """

    engine: FSDPEngine
    first_reads = each_reads = False
    load_device = CPU  #: device that a model is read to, or on which its random weights are drawn

    def load(self, model: ModelConfig, live: nn.Module | None) -> nn.Module:
        """Read the model on rank 0, or build it without weights if another rank, or each for its part, reads it.

        Every rank reads the whole model if it is given from Python, if a plugin shards it, or by `loading`.
        """
        own = live is not None or self.engine.context.plugins.overrides("engine_shard_model")
        spread = not own and self.engine.ranks.size > 1 and self.engine.options.loading != "every_rank"
        self.each_reads = spread and self.engine.options.loading == "sharded"
        self.first_reads = spread and not self.each_reads
        if not own and has_no_weights(model.path):
            self.load_device = self._draws_on(model)
        if not spread:
            return super().load(model, live)
        module, error = None, None
        try:
            if self.engine.ranks.rank == 0 and self.first_reads:
                module = super().load(model, live)
            else:
                module = blank_model(model, self.engine.context.role, self.engine.precision.param)
        except Exception as problem:
            error = problem
        self.engine.ranks.share(error, f"Building the model of '{model.path}'", DataError)
        assert module is not None
        return module

    def _draws_on(self, model: ModelConfig) -> torch.device:
        """Return the device for random weights: the engine's if they take at most a quarter of its memory, else the CPU.

        A CPU draws 4 billion numbers in a minute, an accelerator in less than a second.
        """
        device = self.engine.device
        if device.type not in DRAWS:
            return CPU
        blank = blank_model(model, self.engine.context.role, torch.float32)
        needed = sum(parameter.nbytes for parameter in blank.parameters())
        return device if needed <= (device_bytes(device) or 0) / 4 else CPU

    def place(self, module: nn.Module) -> nn.Module:
        """Cast parameters; the model stays on its device, from which units move when they are sharded."""
        return cast_parameters(module, self.engine.precision.param)


def allocate(root: nn.Module, device: torch.device) -> None:
    """Allocate memory for a sharded module that was built on ``meta``; buffers keep their values."""
    if not any(p.device.type == "meta" for p in root.parameters()):
        return
    buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
    root.to_empty(device=device)
    for name, buffer in root.named_buffers():
        buffer.copy_(buffers[name])


def broadcast(module: nn.Module, full: dict[str, Tensor], device: torch.device) -> None:
    """Fill a sharded module with the weights of rank 0. Collective.

    Args:
        module: the sharded module, the same on all ranks.
        full: on rank 0, the whole weights ``[D0, ...]`` by name; the dict is emptied. Other ranks do not read it.
        device: device of the collectives.
    """
    first = dist.get_rank() == 0
    for name, tensor in own_weights(module).items():
        if first:
            whole = full.pop(name).to(device=device, dtype=tensor.dtype).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(whole, src=0)
        write(tensor, whole)
    if device.type != "cpu":
        torch.accelerator.empty_cache()  # of whole weights, for a sampler in another process


@torch.no_grad()
def read_slices(module: nn.Module, model: ModelConfig, role: str) -> FolderParts:
    """Fill a sharded module with this rank's parts of the folder's weights.

    Args:
        module: the sharded module with allocated memory.
        model: ``[model]``, with the role's path.
        role: the role's name.

    Returns:
        The reader of the folder.

    Raises:
        ConfigError: the model's names differ from those in its files.
        DataError: weights are missing, unknown or of another shape. Nothing was read.
    """
    own = own_weights(module)
    shapes = {name: tensor.shape for name, tensor in own.items()}
    parts = FolderParts.of(module, model, shapes, role, f"{role}.fsdp.loading", INSTEAD)
    for name, tensor in own.items():
        here(tensor).copy_(parts.read(name, span(tensor)))
    return parts
