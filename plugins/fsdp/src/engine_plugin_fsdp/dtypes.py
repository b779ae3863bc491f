"""The types of `mixed_precision`: checks against the device, and the cast of buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from engine_core.errors import ConfigError
from engine_plugin_torch.precision import NAMED, has_bf16

if TYPE_CHECKING:
    from engine_plugin_fsdp.options import FSDPOptions


def check_dtype(key: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a type that the device does not support.

    Raises:
        ConfigError: the device does not support ``dtype``.
    """
    if dtype == torch.bfloat16 and not has_bf16(device):
        raise ConfigError(f"{key}: 'bf16', but {device} has no bfloat16. Set it to 'fp16' or 'fp32'.")
    if dtype == torch.float16 and not has_fp16(device):
        raise ConfigError(f"{key}: 'fp16', but {device} has no float16. Set it to 'fp32'.")


def has_fp16(device: torch.device) -> bool:
    """Return whether a device multiplies matrices in float16."""
    try:
        torch.ones(2, 2, dtype=torch.float16, device=device).mm(
            torch.ones(2, 2, dtype=torch.float16, device=device)
        )
    except (RuntimeError, TypeError):  # the errors of backends without the type
        return False
    return True


def check_types(table: str, options: FSDPOptions, compute: torch.dtype, device: torch.device) -> None:
    """Refuse types of `mixed_precision` that the device does not support.

    Args:
        table: name of the table, for messages: ``actor.fsdp``.
        options: the role's table.
        compute: type of the forward pass, with ``auto`` resolved.
        device: the role's device.

    Raises:
        ConfigError: the device does not support a type.
    """
    check_dtype(f"{table}.mixed_precision.param_dtype", compute, device)
    for key in ("reduce_dtype", "output_dtype", "buffer_dtype"):
        named = getattr(options.mixed_precision, key)
        if named != "auto":
            check_dtype(f"{table}.mixed_precision.{key}", NAMED[named], device)


def cast_buffers(module: nn.Module, named: str) -> nn.Module:
    """Cast floating-point buffers in place and return the module; ``auto`` keeps their types."""
    if named == "auto":
        return module
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(NAMED[named])
    return module
