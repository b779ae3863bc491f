"""The memory of an accelerator that this process may use."""

from __future__ import annotations

import torch


def device_bytes(device: torch.device) -> int | None:
    """Return the bytes of a device within this process's limit; None where the device does not report them.

    The limit is that of ``torch.cuda.set_per_process_memory_fraction``.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    report = getattr(module, "mem_get_info", None)
    if report is None:
        return None
    index = module.current_device() if device.index is None else device.index
    limit = getattr(module, "get_per_process_memory_fraction", None)
    return int(report(index)[1] * (limit(index) if limit else 1.0))


def has_others(device: torch.device) -> bool:
    """Return whether other processes hold more than a tenth of an accelerator's memory."""
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    free, total = module.mem_get_info(index)
    return bool(total - free - module.memory_reserved(index) > total / 10)
