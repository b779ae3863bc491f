"""DeepSpeed itself: imported for this worker's device, joined to the ranks that the runtime has joined, and quiet.

Nothing is compiled here: DeepSpeed builds operators when they are first used, and this engine uses none of them but
for offload to NVMe.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from engine_core.errors import ConfigError, EnvironmentProblem


def load(device: torch.device, table: str) -> Any:
    """The module ``deepspeed``, for a device.

    Args:
        device: that this worker computes on.
        table: ``actor.deepspeed``, for messages.

    Raises:
        EnvironmentProblem: it is not installed, or does not import.
        ConfigError: it was imported for another kind of device.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if device.index is not None or "LOCAL_RANK" not in os.environ:
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # by which it finds its device, in each pass
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    except Exception as error:  # it runs compilers and drivers when it is imported
        raise EnvironmentProblem(
            f"deepspeed does not import: {type(error).__name__}: {error}. Try: pip install engine-plugin-deepspeed"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    kind = get_accelerator().device_name()
    if kind != device.type:
        raise ConfigError(
            f"{table}.device: this worker computes on {device}, and DeepSpeed was set up for '{kind}' "
            "(DS_ACCELERATOR, or another role of this process). Give the role that device, or unset DS_ACCELERATOR."
        )
    return deepspeed


def join(deepspeed: Any) -> None:
    """DeepSpeed talks in the process group that is there.

    On a CPU it would first compile an operator for sums in shared memory, for half a minute and with a compiler; gloo
    carries them as well.
    """
    backend: Any = sys.modules["deepspeed.comm.torch"]  # the attribute of that name is torch
    build = backend.build_shm_op
    backend.build_shm_op = lambda: None
    try:
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    finally:
        backend.build_shm_op = build
