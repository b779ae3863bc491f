"""Option table of the engine (neither torch nor megatron here: read by ``engine validate``)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from engine_core.specs import Options
from engine_plugin_torch.options import LOSS_SCALE


class MegatronOptions(Options):
    """``[actor.megatron]``: the model is sharded over ranks with megatron-core."""

    device: str = "auto"
    """A torch device string. ``auto``: the rank's accelerator. megatron-core needs CUDA."""
    cpu_emulation: bool = False
    """Run on a CPU, to try a run file on a machine without GPUs: megatron-core's calls of CUDA are answered on the CPU. Slow, with the same results up to rounding. Refused on an accelerator."""
    tp: int = Field(default=1, gt=0)
    """Number of ranks that share the heads and the wide dimension of each layer (tensor parallelism). The ranks should be on one host. The value must divide the model's heads, and divide its key-value heads or be a multiple of them."""
    pp: int = Field(default=1, gt=0)
    """Number of ranks among which the layers are divided (pipeline parallelism). Each rank holds consecutive layers. Communication is small, so the ranks may be on different hosts. The value must divide the model's layers."""
    virtual_pp: int = Field(default=1, gt=0)
    """Number of interleaved chunks of layers on each rank of `pp`. More chunks fill and empty the pipeline faster but send more messages. The number of layers must be a multiple of `pp` times this value."""
    ep: int = Field(default=1, gt=0)
    """Number of ranks, with different data, that share the experts of each layer (mixture of experts). The value must divide the number of experts."""
    cp: int = Field(default=1, gt=0)
    """Number of ranks that share the tokens of each micro-batch (context parallelism). Use it for sequences that do not fit on one rank. Each rank holds a part of the tokens; in attention each rank holds all tokens and a share of the heads. `max_tokens_per_rank` is then the budget of these ranks together. The value must divide the heads that `tp` leaves to a rank."""
    sequence_parallel: bool = False
    """With `tp`: also divide the operations between the layers' matrices (norms, sums) by tokens. This saves memory for activations."""
    distributed_optimizer: bool = True
    """Shard the optimizer state, and the float32 copy of 16-bit weights, over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks during the backward pass of the last micro-batch."""
    overlap_param_gather: bool = False
    """With `distributed_optimizer`: gather new weights during the start of the next forward pass. Needs `overlap_grad_reduce`."""
    recompute: Literal["none", "selective", "full"] = "none"
    """``full``: compute the activations of each layer again in the backward pass. This uses less memory and takes about a quarter more time. ``selective``: compute only the activations of attention's core again."""
    compute_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the forward pass and of its weights. ``auto``: bf16 if the accelerator supports it. With ``bf16`` and ``fp16`` the optimizer of a trained role keeps a float32 copy. Log-probs are always float32. ``fp16`` scales the loss, see `loss_scale`."""
    loss_scale: float = Field(default=LOSS_SCALE, gt=0)
    """With ``fp16``: initial factor of the loss. A step whose gradients overflow is skipped on all ranks and halves the factor, down to 1; 2000 good steps double it."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are kept and summed. ``bf16`` requires `compute_dtype` ``bf16``."""
    log_prob_chunk_tokens: int = Field(default=1024, gt=0)
    """Number of response tokens whose logits are in memory at the same time. The logits of one token have the size of the rank's part of the vocabulary, in float32."""
    log_prob_recompute: bool = True
    """Compute logits again in the backward pass, one chunk at a time."""

    @model_validator(mode="after")
    def _fits(self) -> MegatronOptions:
        if self.virtual_pp > 1 and self.pp == 1:
            raise ValueError(
                f"virtual_pp {self.virtual_pp} has no effect with pp 1: set pp, or leave it out."
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel has no effect with tp 1: set tp, or leave it out.")
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "overlap_param_gather needs distributed_optimizer and overlap_grad_reduce: set them, or leave it out."
            )
        if self.grad_reduce_dtype == "bf16" and self.compute_dtype in ("fp32", "fp16"):
            raise ValueError(
                f"grad_reduce_dtype 'bf16' over compute_dtype '{self.compute_dtype}': set it to 'fp32'."
            )
        if self.loss_scale != LOSS_SCALE and self.compute_dtype != "fp16":
            raise ValueError("loss_scale has no effect without compute_dtype = 'fp16'.")
        return self
