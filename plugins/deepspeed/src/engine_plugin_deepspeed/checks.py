"""Checks of the options against ranks and machine, made before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core.errors import ConfigError, EnvironmentProblem
from engine_plugin_deepspeed import library
from engine_plugin_deepspeed.health import found
from engine_plugin_deepspeed.settings import check_passed_on
from engine_plugin_torch.divisors import divisors, nearest_fit

if TYPE_CHECKING:
    import torch

    from engine_plugin_deepspeed.options import DeepSpeedOptions


def check_ranks(options: DeepSpeedOptions, size: int, table: str) -> None:
    """Refuse a `hpz_partition_size` that does not divide the ranks.

    Raises:
        ConfigError: it does not divide them.
    """
    asked = options.hpz_partition_size
    if size % asked:
        raise ConfigError(
            f"{table}.hpz_partition_size is {asked}, which does not divide the {size} ranks of this run. "
            f"{nearest_fit(asked, divisors(size))} Or start another number of ranks."
        )


def check_machine(options: DeepSpeedOptions, device: torch.device, table: str) -> None:
    """Refuse options that DeepSpeed cannot run on this machine.

    Raises:
        ConfigError: a key needs something that this machine lacks, or the installed DeepSpeed does not know the key.
        EnvironmentProblem: DeepSpeed does not import.
    """
    for name in ("quantized_weights", "quantized_gradients"):
        if getattr(options, name) and (device.type == "cpu" or not (found("nvcc") and found("ninja"))):
            lacks = (
                "an accelerator" if device.type == "cpu" else "nvcc and ninja, with which DeepSpeed builds it"
            )
            raise ConfigError(f"{table}.{name} needs {lacks}. Leave it out.")
    for name in ("offload_optimizer", "offload_param"):
        where = getattr(options, name)
        if where.device == "nvme":
            _check_folder(Path(where.nvme_path), f"{table}.{name}.nvme_path")
    deepspeed = library.load(device, table)
    for name in ("fp16", "bf16"):
        if (
            options.compute_dtype == name
            and not getattr(deepspeed.get_accelerator(), f"is_{name}_supported")()
        ):
            raise ConfigError(
                f"{table}.compute_dtype: '{name}', which DeepSpeed does not compute in on {device}. Set it to 'fp32', or leave "
                "it out ('auto')."
            )
    if "nvme" in (options.offload_optimizer.device, options.offload_param.device):
        _check_disk_operator(table)
    check_passed_on(options, table)


def _check_folder(folder: Path, key: str) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{key}: '{folder}' is no folder on this machine. Make it, on a local disk.")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{key}: '{folder}' cannot be written to. Give another folder.")


def _check_disk_operator(table: str) -> None:
    if not found("c++") or not found("ninja"):
        raise ConfigError(
            f"{table}: offload to 'nvme' needs a C++ compiler and ninja, with which DeepSpeed builds it, and this machine "
            "has not both (`engine doctor`). Install them, or offload to 'cpu'."
        )
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder
    except ImportError as error:
        raise EnvironmentProblem(f"DeepSpeed's operator for disks does not import: {error}.") from error
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ConfigError(
            f"{table}: offload to 'nvme' needs the headers of libaio (libaio-dev), which are not on this machine. Install "
            "them, or offload to 'cpu'."
        )
