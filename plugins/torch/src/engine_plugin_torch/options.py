"""Option table of the reference train engine (no torch here, because ``engine validate`` reads it)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from engine_core.specs import Options

if TYPE_CHECKING:
    from engine_core.config import RoleConfig

LOSS_SCALE = 65536.0


class ForwardOptions(Options):
    """The common options of engines that run a ``PackedForward``."""

    device: str = "auto"
    """A torch device string. ``auto``: the accelerator that torch finds, else the CPU."""
    log_prob_chunk_tokens: int = Field(default=1024, gt=0)
    """Number of response tokens whose logits are in memory at the same time. The logits of one token have the size of the vocabulary, in float32."""
    log_prob_recompute: bool = True
    """Compute logits again in the backward pass if the logits of a micro-batch take over 256 MiB or are compiled. ``false``: keep the logits in the compute type; this saves 2.5% to 5% of a step if memory suffices."""
    share_prefixes: bool = True
    """Compute a common prefix of a micro-batch's sequences, such as the prompt of a group, only once. The key has an effect only on the CPU with `model.attention` ``varlen``."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each unit (decoder layers, see ``engine_wrap_policy``) and the log-probs with torch.compile. ``auto``: compile on an accelerator if nothing is quantized and no ranks share a sequence or a layer. Compilation takes seconds in the first step; a small model is then twice as fast."""
    loss_scale: float = Field(default=LOSS_SCALE, gt=0)
    """With ``fp16``: initial factor of the loss. A step whose gradients overflow is skipped on all ranks and halves the factor, down to 1; 2000 good steps double it."""

    fp16_key: ClassVar[str] = "compute_dtype"  #: the key that chooses ``fp16``, for messages

    def compiles(self, accelerator: bool, quantized: bool) -> bool:
        """Return whether forward passes are compiled on such a device, with weights quantized or not."""
        return accelerator and not quantized if self.compile == "auto" else self.compile

    @model_validator(mode="after")
    def _has_a_loss_scale(self) -> Self:
        # Compare with the default, since a resolved config (in a run folder, in a worker) sets every key.
        if self.loss_scale != LOSS_SCALE and getattr(self, "compute_dtype", None) != "fp16":
            raise ValueError(f"loss_scale has no effect without {self.fp16_key} = 'fp16'.")
        return self


class TorchOptions(ForwardOptions):
    """``[actor.torch]``: one process, no sharding."""

    param_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the weights and of the optimizer's state. ``auto``: fp32, but on an accelerator bf16 (fp16 if `compute_dtype` says so) for a frozen role and for the model below an adapter."""
    compute_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the forward pass. ``auto``: bf16 if the accelerator supports it or the weights are bf16, else fp32; ``bf16`` and ``fp16`` with fp32 weights use autocast. Log-probs are always float32. ``fp16`` scales the loss, see `loss_scale`."""
    quantize: Literal["int8", "fp8", "nf4", "fp4"] | None = None
    """Keep the linear layers of frozen weights in 8 or 4 bits. Frozen weights are those of a reference, of a teacher, and of the model below an adapter."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute the activations of each unit in the backward pass. Recomputation uses less memory and takes about a quarter more time. ``auto``: if `max_tokens_per_rank` tokens (8192 if that key is ``auto``), or the longest sequence, would not fit otherwise, by an estimate; never on the CPU."""

    @model_validator(mode="after")
    def _no_upcast(self) -> TorchOptions:
        if self.param_dtype == "bf16" and self.compute_dtype not in ("auto", "bf16"):
            raise ValueError(
                f"compute_dtype '{self.compute_dtype}' over param_dtype 'bf16' has no effect: set param_dtype = 'fp32'."
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


def role_problems(role: str, table: RoleConfig) -> Iterator[str]:
    """Yield the problems of a role's adapter and quantization that show without torch; for ``TrainBackend.check_role``."""
    if table.lora is not None and importlib.util.find_spec("peft") is None:
        yield (
            f"{role}.lora: needs the package peft, which is not installed. Try: pip install 'engine-plugin-torch[lora]', "
            "or take the table out to train the whole model."
        )
    frozen = table.lora is not None or role in ("ref", "teacher")
    if problem := quantize_problem(
        getattr(table.options, "quantize", None), f"{role}.{table.backend}", frozen
    ):
        yield problem


def quantize_problem(method: str | None, table: str, frozen: bool) -> str | None:
    """Return why a role's weights cannot be quantized, as far as can be decided without torch; None if they can.

    Args:
        method: `quantize` of the backend's table, if it is set.
        table: the table with the key: ``actor.torch``.
        frozen: the weights are not trained: those of a frozen role, or those below an adapter.
    """
    if method and not frozen:
        return (
            f"{table}.quantize: '{method}' is for weights that are not trained, and this role's are. Leave the key out, "
            f"or train an adapter above them: [{table.partition('.')[0]}.lora]."
        )
    if method in ("nf4", "fp4") and importlib.util.find_spec("bitsandbytes") is None:
        return (
            f"{table}.quantize: '{method}' needs the package bitsandbytes, which is not installed. Try: "
            "pip install 'engine-plugin-torch[quant]', or use 'int8' or 'fp8', which need no package."
        )
    return None
