"""Reading a model folder once: the first rank reads it, the others get their parts tensor by tensor.

The other ranks build the same module with parameters on ``meta``, so that no rank but the first ever holds
the whole model. Where a plugin builds the module, every rank has it whole until it is sharded.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine_core.contracts.weight_names import own_weights
from engine_plugin_torch.sharded import write


def allocate(root: nn.Module, device: torch.device) -> None:
    """Give memory to a sharded module that was built on ``meta``; buffers stay as they are."""
    if not any(p.device.type == "meta" for p in root.parameters()):
        return
    buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
    root.to_empty(device=device)
    for name, buffer in root.named_buffers():
        buffer.copy_(buffers[name])


def broadcast(module: nn.Module, full: dict[str, Tensor], device: torch.device) -> None:
    """Fill a sharded module with the first rank's weights. Collective.

    Args:
        module: sharded, the same on all ranks.
        full: of the first rank, its whole weights by name; it is emptied on the way. Of the others not read.
        device: what collectives work on.
    """
    first = dist.get_rank() == 0
    for name, tensor in own_weights(module).items():
        if first:
            whole = full.pop(name).to(device=device, dtype=tensor.dtype).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(whole, src=0)
        write(tensor, whole)
