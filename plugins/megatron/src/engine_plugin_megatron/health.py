"""The check of ``engine doctor`` for megatron-core and the optional packages that it uses. None of them is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from engine_core.errors import EnvironmentProblem

FASTER = {"transformer_engine": "Transformer Engine", "apex": "apex"}


def health() -> str:
    """Return one line: the version, the missing optional packages and what is lost without them.

    Raises:
        EnvironmentProblem: megatron-core is not installed, or there is no CUDA device.
    """
    import torch

    try:
        own = version("megatron-core")
    except PackageNotFoundError as error:
        raise EnvironmentProblem(
            "megatron-core is not installed. Try: pip install engine-plugin-megatron"
        ) from error
    missing = [name for module, name in FASTER.items() if find_spec(module) is None]
    without = f"; without {' and '.join(missing)}: AdamW is torch's, not fused" if missing else ""
    if not torch.cuda.is_available():
        raise EnvironmentProblem(f"megatron-core {own}{without}; there is no CUDA device, which it needs")
    return f"megatron-core {own}{without}; {torch.cuda.device_count()} CUDA devices"
