"""Import of DeepSpeed for this worker's device, with its logging reduced to errors, and its process group.

Nothing is compiled: DeepSpeed builds operators at their first use, and this engine uses none of them.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from engine_core.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    from engine_plugin_deepspeed.options import DeepSpeedOptions


def health() -> str:
    """Return the version of DeepSpeed, for ``engine doctor``. It is not imported, which takes seconds.

    Raises:
        EnvironmentProblem: DeepSpeed is not installed.
    """
    try:
        return f"deepspeed {importlib.metadata.version('deepspeed')}, ZeRO 0 to 3"
    except importlib.metadata.PackageNotFoundError as error:
        raise EnvironmentProblem(
            "deepspeed is not installed. Try: pip install engine-plugin-deepspeed"
        ) from error


def check_type(options: DeepSpeedOptions, device: torch.device, table: str) -> None:
    """Refuse a `compute_dtype` that DeepSpeed does not compute in on this device.

    Raises:
        ConfigError: DeepSpeed lacks the type.
        EnvironmentProblem: DeepSpeed does not import.
    """
    accelerator, name = load(device, table).get_accelerator(), options.compute_dtype
    if name in ("fp16", "bf16") and not getattr(accelerator, f"is_{name}_supported")():
        raise ConfigError(
            f"{table}.compute_dtype: '{name}', which DeepSpeed does not compute in on {device}. Set it to 'fp32', or leave "
            "it out ('auto')."
        )


def load(device: torch.device, table: str) -> Any:
    """Import ``deepspeed`` for a device and return the module.

    Args:
        device: this worker's device.
        table: the option table, e.g. ``actor.deepspeed``, for messages.

    Raises:
        EnvironmentProblem: DeepSpeed is not installed, or does not import.
        ConfigError: DeepSpeed was set up for another kind of device.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if device.index is not None or "LOCAL_RANK" not in os.environ:
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed reads its device from it, in each pass
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    except Exception as error:  # its import runs compilers and drivers, which raise anything
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
    """Make DeepSpeed use the existing process group.

    On a CPU DeepSpeed would first compile an operator for reductions in shared memory, which takes half a minute and a
    compiler. That is skipped, and gloo does the reductions.
    """
    backend: Any = sys.modules["deepspeed.comm.torch"]  # the attribute `deepspeed.comm.torch` is torch itself
    build = backend.build_shm_op
    backend.build_shm_op = lambda: None
    try:
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    finally:
        backend.build_shm_op = build
