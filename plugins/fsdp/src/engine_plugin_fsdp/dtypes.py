"""Which types a device computes."""

from __future__ import annotations

import torch

from engine_core.engines.precision import has_bf16
from engine_core.errors import ConfigError


def check_dtype(key: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a type that the device has not.

    Raises:
        ConfigError: it has not.
    """
    if dtype == torch.bfloat16 and not has_bf16(device):
        raise ConfigError(f"{key}: 'bf16', but {device} has no bfloat16. Set it to 'fp16' or 'fp32'.")
