"""The devices of the processes of a link, as values that can be compared between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ProcessDevice:
    """The device of one process."""

    kind: str = "cpu"  # as ``torch.device.type``
    gpu: str = ""  # ``gpu_uuid``


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a CUDA GPU, which is the same in every process; "" for another device."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def visible_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees, by index."""
    import torch

    return [gpu_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
