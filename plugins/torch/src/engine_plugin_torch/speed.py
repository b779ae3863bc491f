"""The speed of a role's passes on an accelerator, fitted to measurements on H200s.

benchmarks/plan has the measurements and what the fit misses. Options that were not measured have no speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine_core.contracts.memory import PassSpeed

if TYPE_CHECKING:
    from engine_plugin_torch.precision import Precision

PRODUCTS, ATTENTION = 0.55, 0.28  # shares of the dense bf16 rate
COMPILED, EAGER = 28.0, 290.0  # bytes moved between products
CAST = 39.0  # bytes in addition, with weights that autocast copies
LAYER = 0.0026  # seconds
MEASURED: dict[str, tuple[Any, ...]] = {
    "quantize": (None,), "fp8": (None,), "sp": (1,), "tp": (1,), "cpu_offload": ("none",), "stage": (0, 1, 2),
}  # fmt: skip
"""Values that were measured, by option of `torch`, `fsdp` and `deepspeed`."""


def speed_of(options: Any, types: Precision, compiled: bool, repeated: float) -> PassSpeed | None:
    """Return the speed of a role; None if it was not measured with these options.

    Args:
        options: the table of the role's backend.
        types: of the role.
        compiled: layers are compiled.
        repeated: share of the layers that are recomputed.
    """
    measured = all(getattr(options, key, values[0]) in values for key, values in MEASURED.items())
    if not measured or types.compute not in (torch.bfloat16, torch.float16):
        return None
    traffic = (COMPILED if compiled else EAGER) + (CAST if types.param == torch.float32 else 0.0)
    return PassSpeed(PRODUCTS, ATTENTION, traffic, LAYER, repeated, "0.6B to 8B on H200s")
