"""The types of a role's weights and forward passes, and the choice of ``auto`` by device.

| device | a role that is trained | a role that is not, or the base below an adapter |
|---|---|---|
| accelerator with bfloat16 | float32 weights, computed in bfloat16 (autocast) | bfloat16 |
| CPU, and any other accelerator | float32 | float32 |
| an accelerator, if the run file says ``fp16`` | float32 weights, computed in float16 (autocast) | float16 |

Trained weights stay float32, because a step of size 1e-6 is lost in the 8 bits of bfloat16's precision. float16 is no
default, because gradients need a loss scale in it, and activations may overflow. bfloat16 is no default on the CPU,
because few CPUs compute faster in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine_core.errors import ConfigError
from engine_plugin_torch.options import TorchOptions

if TYPE_CHECKING:
    from engine_core.contracts.engines import WorkerContext

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMED = {**DTYPES, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in NAMED.items()}


@dataclass(frozen=True)
class Precision:
    """The types of a role's weights and of its forward pass."""

    param: torch.dtype  #: of the weights
    compute: torch.dtype  #: of the forward pass

    def __str__(self) -> str:
        if self.param == self.compute:
            return _NAMES[self.param]
        return f"{_NAMES[self.param]} weights, computed in {_NAMES[self.compute]}"


def choose(options: Any, device: torch.device, table: str, frozen: bool = False) -> Precision:
    """Return the types of a role on a device. At most one number is allocated on the device for the check.

    Args:
        options: the backend's table: `param_dtype`, `compute_dtype`.
        device: the device that the role runs on.
        table: name of the options' table, for messages: ``actor.torch``.
        frozen: the weights are not trained: the role is not trained, or they are below an adapter.

    Raises:
        ConfigError: the device does not support bfloat16 or float16, which an option asks for.
    """
    fast = device.type != "cpu" and has_bf16(device)
    for key in ("param_dtype", "compute_dtype"):
        named = getattr(options, key) if key in type(options).model_fields else None
        if (named == "bf16" and not has_bf16(device)) or (named == "fp16" and not has_fp16(device)):
            raise ConfigError(
                f"{table}.{key}: '{named}', but {device} has no {str(NAMED[named]).removeprefix('torch.')}. "
                "Set it to 'fp32', or leave it out ('auto')."
            )
    return resolved(options, frozen, fast, device.type != "cpu")


def resolved(options: Any, frozen: bool, fast: bool = True, accelerator: bool = True) -> Precision:
    """Return the types that options mean on a kind of device, without a check.

    Args:
        options: the backend's table: `param_dtype`, `compute_dtype`.
        frozen: as in ``choose``.
        fast: the device is an accelerator that computes in bfloat16.
        accelerator: the device is no CPU.
    """
    param, compute = options.param_dtype, options.compute_dtype
    if param == "auto":
        half = "fp16" if compute == "fp16" else "bf16"
        fits = accelerator if half == "fp16" else fast and compute != "fp32"
        param = half if frozen and fits else "fp32"
    if compute == "auto":
        compute = "bf16" if fast or param == "bf16" else "fp32"
    return Precision(NAMED[param], NAMED[compute])


def check_mixed(context: WorkerContext, held: torch.dtype, key: str) -> None:
    """Refuse to mix shares of the actor's weights into weights of 16 bits, where small changes are rounded away.

    Args:
        context: the role's surroundings.
        held: type of the role's weights.
        key: the option that decides it, for the message: ``ref.torch.param_dtype``.

    Raises:
        ConfigError: the run would do so.
    """
    if context.mixed and held.itemsize < 4:
        raise ConfigError(
            f"algorithm.ref_refresh_mix is below 1, and the weights of the role '{context.role}' are {_NAMES[held]}, in which small "
            f"changes are rounded away. Set {key} = 'fp32', or algorithm.ref_refresh_mix = 1."
        )


def find_device(name: str, default: torch.device, table: str) -> torch.device:
    """Return the device that `device` of a role's table names; the default for ``auto``.

    Raises:
        ConfigError: this machine has no device of that name.
    """
    if name == "auto":
        return default
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # the class differs by device
        raise ConfigError(
            f"{table}.device: '{name}' cannot be used here: {str(error).splitlines()[0]}. "
            "Expected 'auto', 'cpu', or an accelerator that `engine doctor` finds."
        ) from error
    return device


def has_bf16(device: torch.device) -> bool:
    """Return whether a device computes in bfloat16 natively (CUDA also emulates it, slowly)."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        torch.ones(1, dtype=torch.bfloat16, device=device).add_(1)
    except (RuntimeError, TypeError):  # the errors of backends without the type
        return False
    return True


def has_fp16(device: torch.device) -> bool:
    """Return whether a device multiplies matrices in float16."""
    try:
        one = torch.ones(2, 2, dtype=torch.float16, device=device)
        one.mm(one)
    except (RuntimeError, TypeError):  # the errors of backends without the type
        return False
    return True


def health() -> str:
    """Return the types that `precision = "auto"` means on this machine, for ``engine doctor``."""
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator() or device
    trained, frozen = (choose(TorchOptions(), device, "actor.torch", frozen) for frozen in (False, True))
    return f"precision auto: {trained}; of weights that are not trained {frozen}"
