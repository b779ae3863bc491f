"""Option table of the reference train engine (no torch here: read by ``engine validate``)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine_core.specs import Options


class TorchOptions(Options):
    """``[actor.torch]``: one process, no sharding."""

    device: str = "auto"
    """``auto`` takes the accelerator that torch finds, else the CPU; or a torch device string."""
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights that are trained."""
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the forward pass (autocast where it differs from `param_dtype`); log-probs are always float32."""
    activation_checkpointing: bool = False
    """Recompute the activations of each unit in the backward pass: less memory, about a quarter more time."""
    log_prob_chunk_tokens: int = Field(1024, gt=0)
    """Response tokens whose logits exist at one time (that many times the vocabulary, in float32)."""
