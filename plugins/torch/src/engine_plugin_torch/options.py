"""Option table of the reference train engine (no torch here, because ``engine validate`` reads it)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from engine_core.specs import Options


class ForwardOptions(Options):
    """The common options of engines that run a ``PackedForward``."""

    device: str = "auto"
    """``auto``: the accelerator that torch finds, else the CPU; or a torch device string."""
    log_prob_chunk_tokens: int = Field(default=1024, gt=0)
    """Number of response tokens whose logits exist at one time (each has the size of the vocabulary, in float32)."""
    log_prob_recompute: bool = True
    """Compute logits again in the backward pass, where those of a micro-batch take over 256 MiB or are compiled. If memory suffices to keep them, in the compute type, ``false`` saves 2.5% to 5% of a step."""
    share_prefixes: bool = True
    """Compute a common prefix of a micro-batch's sequences, such as the prompt of a group, only once. This applies on the CPU with `model.attention` ``varlen``; elsewhere nothing is shared."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each unit (decoder layers, see engine_wrap_policy) and the log-probs with torch.compile: ``auto``: on an accelerator, if nothing is quantized. Compiling takes seconds in the first step; then a small model is twice as fast."""


class TorchOptions(ForwardOptions):
    """``[actor.torch]``: one process, no sharding."""

    param_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the weights and of the optimizer's state. ``auto``: fp32, but bf16 for a frozen role and for the model below an adapter if the accelerator supports it."""
    compute_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the forward pass. ``auto``: bf16 if the accelerator supports it or the weights are bf16, else fp32; ``bf16`` with fp32 weights uses autocast. Log-probs are always float32."""
    quantize: Literal["int8", "fp8", "nf4", "fp4"] | None = None
    """Keep the linear layers of weights that are not trained in 8 or 4 bits: of a reference, a teacher, the model below an adapter."""
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
    def _no_compiled_4_bits(self) -> TorchOptions:
        if self.quantize in ("nf4", "fp4") and self.compile is True:
            raise ValueError(
                f"compile = true with quantize = '{self.quantize}': layers of 4 bits cannot be compiled. "
                "Leave compile out, or use quantize = 'int8'."
            )
        return self
