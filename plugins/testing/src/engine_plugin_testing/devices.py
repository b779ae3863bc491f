"""The devices of engine suites: the CPU, a default device, or the accelerators of ``ENGINE_TEST_DEVICE``.

With ``ENGINE_TEST_DEVICE=cuda`` each rank of a suite uses the GPU of its number and communicates over NCCL (over gloo
for CPU tensors). A suite with more ranks than GPUs is skipped with that reason.
"""

from __future__ import annotations

import os

VARIABLE = "ENGINE_TEST_DEVICE"


def asked_accelerator() -> str:
    """Return the device type that the variable names, such as ``cuda``; empty if it is not set or names ``cpu``."""
    kind = os.environ.get(VARIABLE, "").partition(":")[0]
    return "" if kind == "cpu" else kind


def lacking(kind: str, ranks: int) -> str:
    """Return why this many ranks cannot have a device each; empty if they can."""
    import torch

    found = torch.get_device_module(kind).device_count()
    return "" if ranks <= found else f"needs {ranks} devices of kind '{kind}', and there are {found}"


def take_own(kind: str, rank: int, process_group: str) -> str:
    """Make the device of this rank the current one.

    Returns:
        The backend for ``torch.distributed``: gloo for the CPU and the device's default backend, unless the suite
            names another one.
    """
    import torch
    import torch.distributed as dist

    torch.get_device_module(kind).set_device(rank)
    if process_group != "gloo":
        return process_group
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
