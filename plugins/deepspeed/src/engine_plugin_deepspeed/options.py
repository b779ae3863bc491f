"""The option table ``[actor.deepspeed]`` (no torch here: read by ``engine validate``)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from engine_core.specs import Options
from engine_plugin_torch.options import LOSS_SCALE, ForwardOptions


class OffloadOptions(Options):
    """``[actor.deepspeed.offload_optimizer]`` and ``offload_param``: the state that is kept off the device."""

    device: Literal["none", "cpu"] = "none"
    """``cpu``: keep the state in host memory. ``none``: keep the state on the device."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Use pinned host memory, which is copied faster. ``auto``: if the machine has an accelerator."""


class DeepSpeedOptions(ForwardOptions):
    """``[actor.deepspeed]``: the model is sharded over ranks with DeepSpeed ZeRO."""

    stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage: the state that is sharded over ranks. 0: none. 1: the optimizer state. 2: also gradients. 3: also weights. A role that is not trained is sharded only at stage 3."""
    compute_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the compute weights, of gradients and of the forward pass. ``auto``: bf16 if the accelerator supports it, else fp32. The optimizer keeps float32 copies. Log-probs are always float32. ``fp16`` (stages 1 to 3) scales the loss, see `loss_scale`."""
    reduce_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type in which gradients are summed over ranks. ``auto``: fp32."""
    loss_scale: float = Field(default=LOSS_SCALE, ge=1)
    """With ``fp16``: initial factor of the loss, a power of two. A step whose gradients overflow is skipped on all ranks and halves the factor, down to 1; 2000 good steps double it."""
    offload_optimizer: OffloadOptions = OffloadOptions()
    """The optimizer's state and float32 weights lie in host memory, and the step is taken there (stages 1 to 3)."""
    offload_param: OffloadOptions = OffloadOptions()
    """Each rank's part of the weights lies in host memory until it is used (stage 3)."""
    loading: Literal["auto", "every_rank", "sharded"] = "auto"
    """How the model folder is read. ``every_rank``: each rank reads the whole folder, then keeps its shard. ``sharded`` (stage 3): the model is built in shards, and each rank reads only its shard from a folder of safetensors. No machine then ever holds the whole model. ``auto``: ``every_rank``."""
    overlap_comm: bool | Literal["auto"] = "auto"
    """Sum gradients during the backward pass. ``auto``: at stage 3 on an accelerator, if the optimizer is not offloaded. ``true`` needs stage 2 or 3 without that offload."""
    reduce_bucket_size: int = Field(default=500_000_000, gt=0)
    """Number of elements in one message of gradients."""
    allgather_bucket_size: int = Field(default=500_000_000, gt=0)
    """Number of elements in one message of weights after a step (stages 1 and 2)."""
    sub_group_size: int = Field(default=1_000_000_000, gt=0)
    """Number of elements that the optimizer updates at a time (stage 3)."""
    prefetch_bucket_size: int = Field(default=50_000_000, ge=0)
    """Number of weight elements that are gathered before they are needed (stage 3)."""
    param_persistence_threshold: int = Field(default=100_000, ge=0)
    """A weight with fewer elements stays whole on every rank (stage 3), because a message would cost more than its memory."""
    max_live_parameters: int = Field(default=1_000_000_000, ge=0)
    """Maximum number of gathered weight elements in memory at the same time (stage 3)."""
    max_reuse_distance: int = Field(default=1_000_000_000, ge=0)
    """A gathered weight is not freed if it is used again within this number of elements (stage 3)."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute the activations of each unit in the backward pass. Recomputation uses less memory and takes about a quarter more time. ``auto``: if `max_tokens_per_rank` tokens (8192 if that key is ``auto``), or the longest sequence, would not fit otherwise, by an estimate; never on the CPU."""
    compile: bool | Literal["auto"] = False
    """Compile each unit and the log-probs with torch.compile (stages 0 to 2). ``auto``: compile on an accelerator."""
    weights_bucket_mb: int = Field(default=256, gt=0)
    """Maximum size, in MiB, of a bucket of gathered tensors when weights are sent to a sampler or written to a file."""

    @property
    def param_dtype(self) -> Literal["auto", "fp32"]:
        """Type of the weights that the optimizer updates, as ``precision.choose`` reads it: float32 if trained."""
        return "fp32" if self.compute_dtype in ("fp16", "fp32") else "auto"

    @model_validator(mode="after")
    def _fits_its_stage(self) -> DeepSpeedOptions:
        at_three = {
            "offload_param": self.offload_param.device != "none",
            "loading = 'sharded'": self.loading == "sharded",
        }
        if self.stage < 3 and (name := next((name for name, used in at_three.items() if used), None)):
            raise ValueError(
                f"{name} needs stage 3, and stage is {self.stage}: set stage = 3, or leave it out."
            )
        if self.stage == 0:
            if self.offload_optimizer.device != "none":
                raise ValueError("offload_optimizer needs stage 1 or more: set stage = 1, or leave it out.")
            if self.compute_dtype == "fp16":
                raise ValueError("compute_dtype 'fp16' needs stage 1 or more: set stage = 1, or use 'bf16'.")
        if self.stage == 3 and self.compile:
            raise ValueError(
                "compile cannot be combined with stage 3, which gathers weights inside of each layer: "
                "leave it out, or set stage = 2."
            )
        if self.overlap_comm is True and (self.stage < 2 or self.offload_optimizer.device != "none"):
            raise ValueError(
                "overlap_comm needs stage 2 or 3 without offload_optimizer: gradients of all micro-batches are "
                "summed over ranks at once otherwise. Leave it out."
            )
        if math.frexp(self.loss_scale)[0] != 0.5:
            raise ValueError(
                f"loss_scale {self.loss_scale} is no power of two, which is what DeepSpeed scales by."
            )
        return self
