"""Names of types in the option table, and which of them a device computes."""

from __future__ import annotations

import torch

from engine_core.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_dtype(key: str, name: str, device: torch.device) -> None:
    """Refuse a type that the device has not.

    Raises:
        ConfigError: it has not.
    """
    if (
        name == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ConfigError(
            f"{key} is 'bf16', which {torch.cuda.get_device_name(device)} does not compute. "
            "Use 'fp16' (with loss scaling), or 'fp32'."
        )
