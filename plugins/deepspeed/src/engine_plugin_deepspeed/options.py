"""The option table ``[actor.deepspeed]`` (no torch here: read by ``engine validate``)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from engine_core.specs import Options
from engine_plugin_torch.options import ForwardOptions

LOSS_SCALE = 65536.0


class OffloadOptions(Options):
    """``[actor.deepspeed.offload_optimizer]`` and ``offload_param``: what lies elsewhere than on the device."""

    device: Literal["none", "cpu"] = "none"
    """``cpu``: host memory."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Host memory that cannot be paged out, which travels faster; ``auto``: where there is an accelerator."""


class DeepSpeedOptions(ForwardOptions):
    """``[actor.deepspeed]``: a model over ranks with DeepSpeed ZeRO."""

    stage: Literal[0, 1, 2, 3] = 3
    """What is spread over ranks: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too. A role that is not trained is spread at 3 alone."""
    compute_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the weights that compute, of gradients and of the forward pass: ``auto`` is bf16 where the accelerator has it, else fp32. The optimizer keeps float32 copies. Log-probs are always float32. ``fp16`` (stages 1 to 3) scales the loss, see `loss_scale`."""
    reduce_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type in which gradients are summed over ranks; ``auto``: fp32."""
    loss_scale: float = Field(default=LOSS_SCALE, ge=1)
    """With ``fp16``: the loss is multiplied by this power of two at first. A step whose gradients overflow is skipped on all ranks and halves it; 2000 good steps double it."""
    offload_optimizer: OffloadOptions = OffloadOptions()
    """The optimizer's state and float32 weights lie in host memory, and the step is taken there (stages 1 to 3)."""
    offload_param: OffloadOptions = OffloadOptions()
    """Each rank's part of the weights lies in host memory until it is used (stage 3)."""
    loading: Literal["auto", "every_rank", "sharded"] = "auto"
    """How the model folder is read. ``every_rank``: each reads it all, then keeps its part. ``sharded`` (stage 3): the model is built in parts and each rank reads its own of a folder of safetensors, so that no machine ever holds the whole. ``auto``: ``every_rank``."""
    overlap_comm: bool | Literal["auto"] = "auto"
    """Gradients are summed during the backward pass; ``auto``: at stage 3 on an accelerator, without offload of the optimizer. Else at stage 2 alone."""
    reduce_bucket_size: int = Field(default=500_000_000, gt=0)
    """Numbers of one message of gradients."""
    allgather_bucket_size: int = Field(default=500_000_000, gt=0)
    """Numbers of one message of weights after a step (stages 1 and 2)."""
    sub_group_size: int = Field(default=1_000_000_000, gt=0)
    """Numbers that one part of the optimizer's step updates (stage 3)."""
    prefetch_bucket_size: int = Field(default=50_000_000, ge=0)
    """Numbers of weights gathered ahead of use (stage 3)."""
    param_persistence_threshold: int = Field(default=100_000, ge=0)
    """Weights of fewer numbers stay whole on every rank (stage 3): a message would cost more than their memory."""
    max_live_parameters: int = Field(default=1_000_000_000, ge=0)
    """Numbers of gathered weights held at one time (stage 3)."""
    max_reuse_distance: int = Field(default=1_000_000_000, ge=0)
    """Weights used again within so many numbers are not given back in between (stage 3)."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute the activations of each unit in the backward pass: less memory, about a quarter more time. ``auto``: where by estimate `max_tokens_per_rank` tokens (16384 where that is ``auto``) would else not fit; not on the CPU."""
    compile: bool | Literal["auto"] = False
    """Compile each unit and the log-probs with torch.compile (stages 0 to 2); ``auto``: on an accelerator."""
    weights_bucket_mb: int = Field(default=256, gt=0)
    """Weights are given away (to a sampler, to a file) in buckets of at most this many MiB of gathered tensors."""

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
        # Compare with the default, since a resolved config (in a run folder, in a worker) sets every key.
        if self.loss_scale != LOSS_SCALE and self.compute_dtype != "fp16":
            raise ValueError("loss_scale has no effect without compute_dtype = 'fp16'.")
        if math.frexp(self.loss_scale)[0] != 0.5:
            raise ValueError(
                f"loss_scale {self.loss_scale} is no power of two, which is what DeepSpeed scales by."
            )
        return self
