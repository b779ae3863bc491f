"""Where the suites of engines run: on the CPU or whatever is there, or on the accelerators that ``ENGINE_TEST_DEVICE`` asks for.

With ``ENGINE_TEST_DEVICE=cuda`` each rank of a suite has the GPU of its number and talks over NCCL (over gloo where tensors
lie on the CPU); a suite of more ranks than there are GPUs is skipped, with that reason.
"""

from __future__ import annotations

import os

VARIABLE = "ENGINE_TEST_DEVICE"


def asked_accelerator() -> str:
    """The kind of device that the variable names, such as ``cuda``; empty where it is not set, or says ``cpu``."""
    kind = os.environ.get(VARIABLE, "").partition(":")[0]
    return "" if kind == "cpu" else kind


def lacking(kind: str, ranks: int) -> str:
    """Why this many ranks cannot have a device each; empty where they can."""
    import torch

    found = torch.get_device_module(kind).device_count()
    return "" if ranks <= found else f"needs {ranks} devices of kind '{kind}', and there are {found}"


def take_own(kind: str, rank: int, process_group: str) -> str:
    """Make the device of this rank the current one.

    Returns:
        What to initialise ``torch.distributed`` with: gloo for the CPU, the device's own backend beside it, unless the suite
        names something else.
    """
    import torch
    import torch.distributed as dist

    torch.get_device_module(kind).set_device(rank)
    if process_group != "gloo":
        return process_group
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
