"""Reading a model folder by parts: each rank reads of each weight the rows that it keeps, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine_core.engines.folder_parts import check_names, fingerprint, weight_files
from engine_core.engines.sharded import here, span
from engine_core.engines.shards import Shards
from engine_core.engines.value_models import reset_head
from engine_core.engines.weights import own_weights

if TYPE_CHECKING:
    from engine_core.config import ModelConfig

INSTEAD = "Set loading = 'broadcast', which reads it on one rank."


def read_slices(module: nn.Module, model: ModelConfig, role: str) -> tuple[int, str]:
    """Fill a sharded module with this rank's parts of the folder's weights.

    Args:
        module: sharded, with memory.
        model: ``[model]``, with the role's path.

    Returns:
        Bytes read of the files, and ``fingerprint`` of the folder.

    Raises:
        ConfigError: the model's names are not those of its files.
        DataError: weights are missing, left over or of another shape. Nothing was read.
    """
    folder = Path(model.path)
    shards = Shards(folder, "model", weight_files(folder))
    own = own_weights(module)
    fresh = check_names(
        module,
        shards,
        {name: list(t.shape) for name, t in own.items()},
        role,
        f"{role}.fsdp.loading",
        INSTEAD,
    )
    count = 0
    with torch.no_grad():
        for name, tensor in own.items():
            if name in fresh:
                head = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
                reset_head(head, model.seed)
                here(tensor).copy_(head.weight[span(tensor)])
                continue
            part = shards.read(name, span(tensor))
            count += part.numel() * part.element_size() if here(tensor).numel() else 0
            here(tensor).copy_(part)
    return count, fingerprint(shards)
