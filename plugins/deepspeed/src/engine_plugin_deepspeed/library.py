"""DeepSpeed itself: its import for this worker's device, its process group, and its config from the option table.

Nothing is compiled: DeepSpeed builds operators at their first use, and this engine uses none of them.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from engine_core.errors import ConfigError, EnvironmentProblem
from engine_plugin_torch.loss_scale import GROWTH_STEPS

if TYPE_CHECKING:
    from engine_plugin_deepspeed.options import DeepSpeedOptions, OffloadOptions


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


def settings(
    options: DeepSpeedOptions, compute: torch.dtype, device: torch.device, max_grad_norm: float
) -> dict[str, Any]:
    """Return the config for ``deepspeed.initialize``.

    The engine splits batches into micro-batches. DeepSpeed is configured for one micro-batch per step, so it neither
    divides the loss nor counts steps.

    Args:
        compute: type of the weights in the forward pass.
        device: the device of the weights.
        max_grad_norm: 0 disables clipping.
    """
    half = compute != torch.float32 and options.stage > 0
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": managed(options),
        "gradient_clipping": max_grad_norm,
        "steps_per_print": 2**62,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32" if options.reduce_dtype == "auto" else options.reduce_dtype,
        "zero_optimization": zero(options, device),
        "bf16": {"enabled": half and compute == torch.bfloat16, "check_grad_overflow": True},
        "fp16": {
            "enabled": half and compute == torch.float16,
            "initial_scale_power": round(math.log2(options.loss_scale)),
            "loss_scale_window": GROWTH_STEPS,
            "hysteresis": 1,
            "min_loss_scale": 1,
        },
    }
    if half and options.stage > 1:  # at stage 1 DeepSpeed would choose another optimizer
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    return made


def managed(options: DeepSpeedOptions) -> bool:
    """Return whether the engine marks the last micro-batch for DeepSpeed (managed gradient accumulation).

    True at stage 0, where the engine reduces gradients itself before the step. Also true at stage 3 without offload of
    the optimizer: there gradients are reduced after each micro-batch anyway, and only this setting overlaps the
    reduction with the backward pass.
    """
    return options.stage == 0 or (options.stage == 3 and options.offload_optimizer.device == "none")


def zero(options: DeepSpeedOptions, device: torch.device) -> dict[str, Any]:
    """Return the table `zero_optimization`."""
    on_accelerator = device.type != "cpu"
    overlap: bool = options.overlap_comm is True
    if options.overlap_comm == "auto":
        overlap = on_accelerator and options.stage == 3 and options.offload_optimizer.device == "none"
    made: dict[str, Any] = {
        "stage": options.stage,
        "overlap_comm": overlap,
        "reduce_bucket_size": options.reduce_bucket_size,
        "allgather_bucket_size": options.allgather_bucket_size,
    }
    if options.stage == 3:
        made |= {
            "sub_group_size": options.sub_group_size,
            "stage3_prefetch_bucket_size": options.prefetch_bucket_size,
            "stage3_param_persistence_threshold": options.param_persistence_threshold,
            "stage3_max_live_parameters": options.max_live_parameters,
            "stage3_max_reuse_distance": options.max_reuse_distance,
        }
    for name in ("offload_optimizer", "offload_param"):
        where: OffloadOptions = getattr(options, name)
        if where.device != "none":
            pinned = on_accelerator if where.pin_memory == "auto" else where.pin_memory
            made[name] = {"device": where.device, "pin_memory": pinned}
    return made
