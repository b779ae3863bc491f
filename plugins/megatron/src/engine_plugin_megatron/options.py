"""Option table of the engine (neither torch nor megatron here: read by ``engine validate``)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from engine_core.specs import Options

LOSS_SCALE = 65536.0


class MegatronOptions(Options):
    """``[actor.megatron]``: the model spread over ranks with megatron-core."""

    device: str = "auto"
    """``auto`` takes the rank's own accelerator; or a torch device string. megatron-core needs CUDA."""
    tp: int = Field(default=1, gt=0)
    """Ranks that share each layer: its heads and its wide dimension (tensor parallelism). They should be of one host. Must divide the model's heads and key-value heads."""
    pp: int = Field(default=1, gt=0)
    """Ranks that hold consecutive layers each (pipeline parallelism): little is sent, and it may be sent between hosts. Must divide the model's layers."""
    virtual_pp: int = Field(default=1, gt=0)
    """Chunks of layers that each rank of `pp` holds, interleaved: the pipeline is filled and emptied quicker, for more messages. Layers must divide by `pp` times this."""
    ep: int = Field(default=1, gt=0)
    """The number of ranks with different data that share the experts of each layer (a mixture of experts). Must divide the experts."""
    cp: int = Field(default=1, gt=0)
    """Ranks that share the tokens of each micro-batch (context parallelism), for sequences that one rank does not hold: each has a stretch of them, and in attention all of them with a share of the heads. `max_tokens_per_rank` is of the ranks together. Must divide the heads that `tp` leaves to a rank."""
    sequence_parallel: bool = False
    """With `tp`: what lies between the layers' matrices (norms, sums) is shared by tokens, too: less memory for activations."""
    distributed_optimizer: bool = True
    """The optimizer's state, and the float32 copy of 16-bit weights, are spread over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = False
    """Gradients are summed over data-parallel ranks while the last micro-batch is still going backward."""
    overlap_param_gather: bool = False
    """With `distributed_optimizer`: new weights are gathered while the next forward pass begins. Needs `overlap_grad_reduce`."""
    recompute: Literal["none", "selective", "full"] = "none"
    """``full``: the activations of each layer are computed again in the backward pass (less memory, about a quarter more time). ``selective``: those of attention's core alone."""
    compute_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the forward pass and of the weights that it reads; ``auto`` is bf16 where the accelerator has it. With ``bf16`` and ``fp16`` a trained role keeps a float32 copy in its optimizer. Log-probs are always float32. ``fp16`` scales the loss, see `loss_scale`."""
    loss_scale: float = Field(default=LOSS_SCALE, gt=0)
    """With ``fp16``: the loss is multiplied by this much at first. A step whose gradients overflow is skipped on all ranks and halves it; 2000 good steps double it."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are kept and summed; ``bf16`` with `compute_dtype` ``bf16`` alone."""
    log_prob_chunk_tokens: int = Field(default=1024, gt=0)
    """Response tokens whose logits exist at one time (that many times a rank's part of the vocabulary, in float32)."""
    log_prob_recompute: bool = True
    """Compute logits again in the backward pass, a chunk at a time."""

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
