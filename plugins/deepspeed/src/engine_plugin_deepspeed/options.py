"""The option table ``[actor.deepspeed]`` (no torch here: read by ``engine validate``)."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from engine_core.errors import did_you_mean
from engine_core.specs import Options
from engine_plugin_torch.options import ForwardOptions

LOSS_SCALE = 65536.0

OURS = {
    "stage": "stage",
    "offload_optimizer": "offload_optimizer",
    "offload_param": "offload_param",
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": "offload_optimizer.pin_memory",
    "overlap_comm": "overlap_comm",
    "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size",
    "sub_group_size": "sub_group_size",
    "prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "param_persistence_threshold": "param_persistence_threshold",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "max_live_parameters": "max_live_parameters",
    "stage3_max_live_parameters": "max_live_parameters",
    "max_reuse_distance": "max_reuse_distance",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "zero_hpz_partition_size": "hpz_partition_size",
    "zero_quantized_weights": "quantized_weights",
    "zero_quantized_gradients": "quantized_gradients",
}
"""Keys of DeepSpeed's `zero_optimization` that have a key of this table."""
BARRED = {
    "zenflow": "its steps are not those of this engine",
    "elastic_checkpoint": "checkpoints are the engine's own and load under any number of ranks",
    "load_from_fp32_weights": "checkpoints are the engine's own",
    "legacy_stage1": "DeepSpeed has removed it",
    "gather_16bit_weights_on_model_save": "exports are the engine's own",
    "stage3_gather_16bit_weights_on_model_save": "exports are the engine's own",
    "stage3_gather_fp16_weights_on_model_save": "exports are the engine's own",
    "compute_grad_norm": "a step without its norm cannot be skipped where it is not finite",
    "round_robin_gradients": "DeepSpeed then reads and writes other weights than it is asked for, in checkpoints too",
    "pipeline_loading_checkpoint": "checkpoints are the engine's own",
    "save_muon_momentum_buffer_in_memory": "the optimizer is that of [optim] or of a plugin",
    "zero_quantized_nontrainable_weights": "a role that is not trained is kept whole in its type",
}
"""The keys that cannot be set, and why."""


class OffloadOptions(Options):
    """``[actor.deepspeed.offload_optimizer]`` and ``offload_param``: what lies elsewhere than on the device."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """``cpu``: host memory. ``nvme``: files below `nvme_path` (stage 3; needs libaio and a compiler)."""
    nvme_path: str = ""
    """Folder on a fast local disk, for ``nvme``."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Host memory that cannot be paged out, which travels faster; ``auto``: where there is an accelerator."""
    buffer_count: int = Field(default=5, gt=0)
    """Buffers between disk and memory, for ``nvme``; an optimizer's must be 4 or more."""

    @model_validator(mode="after")
    def _has_a_folder(self) -> OffloadOptions:
        if (self.device == "nvme") != bool(self.nvme_path):
            need = (
                "needs nvme_path, a folder on a local disk" if self.device == "nvme" else "has no nvme_path"
            )
            raise ValueError(f"device '{self.device}' {need}.")
        return self


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
    hpz_partition_size: int = Field(default=1, gt=0)
    """ZeRO++: ranks of one machine among which a second copy of the weights is spread, so that the backward pass gathers within it (stage 3). Must divide the ranks."""
    quantized_weights: bool = False
    """ZeRO++: weights travel in 8 bits (stage 3, an accelerator). What is computed is rounded by it."""
    quantized_gradients: bool = False
    """ZeRO++: gradients travel in 4 bits (stage 3, an accelerator)."""
    zero: dict[str, Any] = {}
    """Further keys of DeepSpeed's `zero_optimization`, checked against the installed version: ``{ contiguous_gradients = false }``."""
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
            "hpz_partition_size": self.hpz_partition_size > 1,
            "quantized_weights": self.quantized_weights,
            "quantized_gradients": self.quantized_gradients,
            "loading = 'sharded'": self.loading == "sharded",
            "offload_optimizer.device = 'nvme'": self.offload_optimizer.device == "nvme",
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
        if self.loading == "sharded":
            companions = {
                "hpz_partition_size": self.hpz_partition_size > 1,
                "quantized_weights": self.quantized_weights,
                "offload_param.device = 'nvme'": self.offload_param.device == "nvme",
            }
            if name := next((name for name, used in companions.items() if used), None):
                raise ValueError(f"loading = 'sharded' cannot be combined with {name}: leave one out.")
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

    @model_validator(mode="after")
    def _passes_on(self) -> DeepSpeedOptions:
        for name in self.zero:
            if name in OURS:
                raise ValueError(f"zero.{name}: set {OURS[name]} in this table instead.")
            if name in BARRED:
                raise ValueError(f"zero.{name} cannot be set: {BARRED[name]}. Leave it out.")
        return self


def unknown_key(name: str, known: list[str]) -> str:
    """Return a suggestion for a key that the installed DeepSpeed does not know."""
    return did_you_mean(name, sorted(set(known) - set(OURS) - set(BARRED)))
