"""The reader of a model folder by parts: each rank reads only the rows that it keeps of each weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_core.contracts.weight_names import own_weights
from engine_plugin_torch.folder_parts import FolderParts
from engine_plugin_torch.sharded import here, span

if TYPE_CHECKING:
    from torch import nn

    from engine_core.config import ModelConfig

INSTEAD = "Set loading = 'broadcast', which reads it on one rank."


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
    shapes = {name: list(tensor.shape) for name, tensor in own.items()}
    parts = FolderParts(module, model, shapes, role, f"{role}.fsdp.loading", INSTEAD)
    for name, tensor in own.items():
        here(tensor).copy_(parts.read(name, span(tensor)))
    return parts
