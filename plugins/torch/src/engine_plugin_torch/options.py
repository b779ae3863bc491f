"""Option table of the reference train engine (no torch here, because ``engine validate`` reads it)."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from engine_core.specs import Options

UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1024, "MI": 1024**2, "GI": 1024**3}
SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMG]?I?)B", re.IGNORECASE)


def bytes_of(size: str) -> int:
    """Return the bytes of a size such as ``"70GiB"`` (1024^3 each) or ``"500 MB"`` (1000^2 each).

    Raises:
        ValueError: ``size`` is no size.
    """
    found = SIZE.fullmatch(size.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(f"'{size}' is no size: expected a number and a unit, such as '70GiB' or '500MB'.")
    return int(float(found[1]) * UNITS[found[2].upper()])


class ForwardOptions(Options):
    """The common options of engines that run a ``PackedForward``."""

    device: str = "auto"
    """``auto``: the accelerator that torch finds, else the CPU; or a torch device string."""
    log_prob_chunk_tokens: int = Field(default=1024, gt=0)
    """Number of response tokens whose logits exist at one time (each has the size of the vocabulary, in float32)."""
    log_prob_recompute: bool = True
    """Compute logits again in the backward pass. If memory suffices for the logits of a whole micro-batch in the compute type, ``false`` saves 2.5% to 5% of a step."""
    sequence_chunk_tokens: int = Field(default=0, ge=0)
    """Most tokens that feed-forward layers process at a time; they are recomputed in the backward pass. For long sequences this saves memory for about 10% more time. 0: all at once."""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Mode of torch.compile. ``max-autotune-no-cudagraphs`` tries several kernels for each matrix product, which takes minutes in the first steps, and keeps the fastest."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each unit (decoder layers, see engine_wrap_policy) and the log-probs with torch.compile: ``auto``: on an accelerator, if nothing is quantized. Compiling takes seconds in the first step; then a small model is twice as fast."""


class DeviceMapOptions(Options):
    """The common options of engines whose frozen models may be larger than a device."""

    device_map: Literal["auto", "sequential"] | None = None
    """Placement of a frozen role's layers on all accelerators of the process, in host memory and on disk (needs the package accelerate). ``auto``: about as much on each accelerator; ``sequential``: each accelerator is filled before the next."""
    max_memory: dict[str, str] = {}
    """Most bytes of weights by device, for `device_map`: ``{ 0 = "60GiB", cpu = "100GiB" }``; a device that is not named gets none. Weights that fit nowhere are read from disk in each pass. Empty: the free memory."""
    offload_folder: str = ""
    """Folder on a local disk, for `device_map`. Weights that cannot be read directly from the model folder (experts of a mixture) are written below it and removed at the end. Empty: the system's folder for temporary files."""

    @field_validator("max_memory")
    @classmethod
    def _sizes(cls, value: dict[str, str]) -> dict[str, str]:
        for name, size in value.items():
            if name != "cpu" and not name.isdigit():
                raise ValueError(
                    f"'{name}' is no device: expected 'cpu', or the number of an accelerator, such as '0'."
                )
            bytes_of(size)
        return value

    @model_validator(mode="after")
    def _places_something(self) -> DeviceMapOptions:
        for name in ("max_memory", "offload_folder"):
            if getattr(self, name) and self.device_map is None:
                raise ValueError(f"{name} has no effect without device_map = 'auto'.")
        return self


class TorchOptions(ForwardOptions, DeviceMapOptions):
    """``[actor.torch]``: one process, no sharding."""

    param_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the weights and of the optimizer's state. ``auto``: fp32, but bf16 for a frozen role and for the model below an adapter if the accelerator supports it."""
    compute_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the forward pass. ``auto``: bf16 if the accelerator supports it or the weights are bf16, else fp32; ``bf16`` with fp32 weights uses autocast. Log-probs are always float32."""
    quantize: Literal["int8", "fp8", "nf4", "fp4"] | None = None
    """Keep the linear layers of weights that are not trained in 8 or 4 bits: of a reference, a teacher, the model below an adapter. Its effect is measured and logged at the start."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute the activations of each unit in the backward pass: less memory, about a quarter more time. ``auto``: if by estimate `max_tokens_per_rank` tokens (16384 if that is ``auto``) would not fit otherwise; never on the CPU."""

    @model_validator(mode="after")
    def _no_upcast(self) -> TorchOptions:
        if self.param_dtype == "bf16" and self.compute_dtype == "fp32":
            raise ValueError(
                "compute_dtype 'fp32' over param_dtype 'bf16' has no effect: set param_dtype = 'fp32'."
            )
        return self

    @model_validator(mode="after")
    def _spread_alone(self) -> TorchOptions:
        conflicts = {"quantize": self.quantize is not None, "compile": self.compile is True}
        if self.device_map and (name := next((name for name, used in conflicts.items() if used), None)):
            raise ValueError(
                f"{name} cannot be combined with device_map, which moves weights while a layer computes: leave one out."
            )
        return self

    @model_validator(mode="after")
    def _no_compiled_4_bits(self) -> TorchOptions:
        if self.quantize in ("nf4", "fp4") and self.compile is True:
            raise ValueError(
                f"compile = true with quantize = '{self.quantize}': layers of 4 bits cannot be compiled. "
                "Leave compile out, or use quantize = 'int8'."
            )
        return self
