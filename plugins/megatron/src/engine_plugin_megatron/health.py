"""What ``engine doctor`` says of this machine: megatron-core and what it uses where it is there. None of it is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from engine_core.errors import EnvironmentProblem

FASTER = {"transformer_engine": "Transformer Engine", "apex": "apex"}


def health() -> str:
    """One line: the version, what is missing beside it and what that costs.

    Raises:
        EnvironmentProblem: there is no megatron-core, or no GPU for it.
    """
    import torch

    try:
        own = version("megatron-core")
    except PackageNotFoundError as error:
        raise EnvironmentProblem(
            "megatron-core is not installed. Try: pip install engine-plugin-megatron"
        ) from error
    missing = [name for module, name in FASTER.items() if find_spec(module) is None]
    told = f"; without {' and '.join(missing)}: AdamW is torch's, not fused" if missing else ""
    if not torch.cuda.is_available():
        raise EnvironmentProblem(f"megatron-core {own}{told}; there is no CUDA device, which it needs")
    return f"megatron-core {own}{told}; {torch.cuda.device_count()} CUDA devices"
