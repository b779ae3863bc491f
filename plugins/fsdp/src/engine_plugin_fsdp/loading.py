"""Reading a model folder once: the first rank reads it, the others get their parts tensor by tensor.

The other ranks build the same module with parameters on ``meta``, so that no rank but the first ever holds
the whole model. Where a plugin builds the module, every rank has it whole until it is sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine_core.engines.model_loading import load_hf_config
from engine_core.engines.sharded import write
from engine_core.engines.value_models import VALUE_ROLES, value_class
from engine_core.engines.weights import own_weights

if TYPE_CHECKING:
    from engine_core.config import ModelConfig


def blank_model(model: ModelConfig, role: str, dtype: torch.dtype) -> nn.Module:
    """The module that ``[model]`` gives for a role, its parameters on ``meta``, its buffers real."""
    config: Any = load_hf_config(model)
    settings = {"attn_implementation": model.attention, "dtype": dtype}
    with empty_parameters():
        if role in VALUE_ROLES:
            config.num_labels = 1
            kind: Any = value_class(config)
            return kind._from_config(config, **settings)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code, **settings)


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Within it every parameter that a module is given is on ``meta``; buffers are as they are."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


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
