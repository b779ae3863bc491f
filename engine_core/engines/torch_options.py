"""Option table of the reference train engine (no torch here: read by ``engine validate``)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from engine_core.specs import Options


class ForwardOptions(Options):
    """What every engine that runs a ``PackedForward`` has in its table."""

    device: str = "auto"
    """``auto`` takes the accelerator that torch finds, else the CPU; or a torch device string."""
    log_prob_chunk_tokens: int = Field(default=1024, gt=0)
    """Response tokens whose logits exist at one time (that many times the vocabulary, in float32)."""
    log_prob_recompute: bool = True
    """Compute logits again in the backward pass. Where there is memory for those of a whole micro-batch, in the compute type, ``false`` saves a fortieth to a twentieth of a step."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each unit (decoder layers, see engine_wrap_policy) and the log-probs with torch.compile: ``auto`` on an accelerator, not on the CPU. It takes seconds in the first step, then a small model is twice as fast."""


class TorchOptions(ForwardOptions):
    """``[actor.torch]``: one process, no sharding."""

    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights that are trained and of the optimizer's state."""
    compute_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the forward pass: ``auto`` is `param_dtype`; ``bf16`` over fp32 weights is autocast. Log-probs are always float32."""
    activation_checkpointing: bool = False
    """Recompute the activations of each unit in the backward pass: less memory, about a quarter more time."""

    @model_validator(mode="after")
    def _no_upcast(self) -> TorchOptions:
        if self.param_dtype == "bf16" and self.compute_dtype == "fp32":
            raise ValueError(
                "compute_dtype 'fp32' over param_dtype 'bf16' has no effect: set param_dtype = 'fp32'."
            )
        return self
