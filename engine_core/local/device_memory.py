"""The memory of an accelerator that this process may use."""

from __future__ import annotations

import torch


def device_bytes(device: torch.device) -> int | None:
    """Return the bytes of a device within this process's limit; None where the device does not report them.

    The limit is that of ``torch.cuda.set_per_process_memory_fraction``.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is None or not hasattr(module, "mem_get_info"):
        return None
    index, limit = _index(device), getattr(module, "get_per_process_memory_fraction", None)
    return int(module.mem_get_info(index)[1] * (limit(index) if limit else 1.0))


def has_others(device: torch.device) -> bool:
    """Return whether other processes hold more than a tenth of an accelerator's memory."""
    module, index = torch.get_device_module(device), _index(device)
    free, total = module.mem_get_info(index)
    return bool(total - free - module.memory_reserved(index) > total / 10)


def _index(device: torch.device) -> int:
    """Return the index of an accelerator; the current one's for a device without an index."""
    return int(torch.get_device_module(device).current_device()) if device.index is None else device.index
