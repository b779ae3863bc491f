"""The option table ``[actor.fsdp]`` (no torch here, because ``engine validate`` reads it)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from engine_core.specs import Options
from engine_plugin_torch.options import ForwardOptions

LOSS_SCALE = 65536.0
FloatType = Literal["fp32", "bf16", "fp16"]


class WrapOptions(Options):
    """``[actor.fsdp.wrap]``: which submodules are one unit, gathered and freed together.

    A plugin's ``engine_wrap_policy`` goes before it.
    """

    layer_classes: list[str] = []
    """Class names of the submodules that are units, ``["Qwen3DecoderLayer"]``; empty: the decoder layers."""
    layers_per_unit: int = Field(default=1, gt=0)
    """Neighbouring units that are gathered as one: fewer and larger messages, more memory."""


class MixedPrecision(Options):
    """``[actor.fsdp.mixed_precision]``: types of what is computed and sent; the weights that are kept have `param_dtype` of the table above."""

    param_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of gathered weights and of the forward pass: ``auto``: bf16 if the accelerator supports it or the kept weights are bf16, else fp32. Log-probs are always float32. ``fp16`` scales the loss, see `loss_scale`."""
    reduce_dtype: FloatType = "fp32"
    """Type in which gradients are summed over ranks."""


class FSDPOptions(ForwardOptions):
    """``[actor.fsdp]``: the model spread over ranks with FSDP2."""

    sharding: Literal["full", "grad_op", "hybrid", "none"] = "full"
    """``full``: weights, gradients and optimizer are spread over all ranks (ZeRO-3). ``grad_op``: weights stay gathered between forward and backward pass (ZeRO-2): faster, more memory. ``hybrid``: ``full`` inside groups of `shard_group_size` ranks, copies between groups. ``none``: every rank holds everything."""
    shard_group_size: int = Field(default=0, ge=0)
    """Ranks of one group of ``hybrid``; 0: the ranks of one host."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Whether the weights of a unit are freed after its forward pass and gathered again for its backward pass. ``auto``: yes with ``full`` and ``hybrid``. ``false`` uses more memory and fewer messages: it turns ``full`` into ``grad_op``, and ``hybrid`` then keeps weights whole between the passes. The last unit, embeddings and head always stay gathered, because the backward pass begins with them."""
    wrap: WrapOptions = WrapOptions()
    """What is gathered at one time."""
    param_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the weights that are kept, and of the optimizer's state: ``auto`` is fp32; of a role that is not trained and of the model below an adapter bf16, where the accelerator has it."""
    mixed_precision: MixedPrecision = MixedPrecision()
    """Types of what is computed and sent."""
    fp8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Large linear layers, but for the head, multiply in 8 bits, on GPUs that can (Hopper; ``tensorwise``: Ada, too): one scale for a ``tensorwise`` tensor (fastest), one for each row (``rowwise``: more exact), or that with the weight's gradient in bf16 (``rowwise_with_gw_hp``). Needs ``pip install 'engine-plugin-fsdp[fp8]'``."""
    loss_scale: float = Field(default=LOSS_SCALE, gt=0)
    """With ``fp16``: the loss is multiplied by this much at first. A step whose gradients overflow is skipped on all ranks and halves it; 2000 good steps double it."""
    gradient_sync: Literal["last", "each"] = "last"
    """Gradients are summed over ranks after the ``last`` micro-batch (fewer messages; until then each rank holds whole gradients), or after ``each`` (least memory)."""
    cpu_offload: Literal["none", "optimizer", "params"] = "none"
    """``optimizer``: its state lies in host memory between steps. ``params``: weights, gradients and optimizer lie there, the step is taken on the CPU, units travel to the device when they are used."""
    activation_checkpointing: Literal["none", "full", "auto"] | Annotated[int, Field(gt=0)] = "auto"
    """``auto``: ``full`` where by estimate `max_tokens_per_rank` tokens (16384 where that is ``auto``) would else not fit; not on the CPU. ``full``: recompute the activations of each unit in the backward pass (less memory, about a quarter more time). A number n: those of every n-th unit."""
    activation_offload: bool = False
    """Activations that a unit keeps lie in host memory until its backward pass."""
    compile: bool | Literal["auto"] = False
    """Compile each unit and the log-probs with torch.compile; ``auto``: on an accelerator."""
    sp: int = Field(default=1, gt=0)
    """Ranks that share the tokens of each micro-batch (sequence parallelism), for sequences that one rank does not hold. Must divide the model's key-value heads and the ranks."""
    tp: int = Field(default=1, gt=0)
    """Ranks that share each layer: its heads and its wide dimension (tensor parallelism), for layers that one rank does not hold or that take too long. They lie next to each other, and should be of one host. Must divide the model's heads, its key-value heads, and with `sp` the ranks."""
    loading: Literal["auto", "broadcast", "sharded", "every_rank"] = "auto"
    """How the model folder is read. ``sharded``: each rank reads its own parts alone, from a folder of safetensors that lies on every machine. ``broadcast``: the first rank reads it, tensor by tensor goes to the others, which never hold the whole. ``every_rank``: each reads it all. ``auto``: ``broadcast``, where the model is built by the core."""
    probe: bool | Literal["auto"] = "auto"
    """At the start the sharded model computes 16 tokens, and is refused where that differs from what it computed whole, on the first rank's CPU. ``auto``: on several ranks, a model of at most 2 billion parameters whose attention runs on a CPU."""
    weights_bucket_mb: int = Field(default=256, gt=0)
    """Weights are given away (to a sampler, to a file) in buckets of at most this many MiB of gathered tensors."""

    @property
    def compute_dtype(self) -> Literal["auto", "fp32", "bf16", "fp16"]:
        """Type of the forward pass, by the name that the core asks for."""
        return self.mixed_precision.param_dtype

    @property
    def keeps_gathered(self) -> bool:
        """Whether weights stay whole from the forward to the backward pass."""
        return self.sharding in ("grad_op", "none") or self.reshard_after_forward is False

    @model_validator(mode="after")
    def _fits(self) -> FSDPOptions:
        if self.reshard_after_forward is True and self.sharding in ("grad_op", "none"):
            raise ValueError(
                f"reshard_after_forward true contradicts sharding '{self.sharding}', which keeps weights gathered: "
                "set sharding = 'full', or leave it out."
            )
        if self.shard_group_size and self.sharding != "hybrid":
            raise ValueError(
                f"shard_group_size {self.shard_group_size} has no effect with sharding '{self.sharding}': "
                "set sharding = 'hybrid', or leave it out."
            )
        for name, ranks in (("sp", self.sp), ("tp", self.tp)):
            if ranks > 1 and self.compile:
                raise ValueError(f"{name} {ranks} cannot be combined with compile: leave one out.")
        for name, used in (
            ("fp8", self.fp8),
            ("loading = 'sharded'", self.loading == "sharded"),
        ):
            if used and self.tp > 1:
                raise ValueError(f"{name} cannot be combined with tp {self.tp}: leave one out.")
        if self.probe is True and self.loading == "sharded":
            raise ValueError(
                "probe = true needs a rank that holds the whole model, and with loading = 'sharded' none does: "
                "leave one out."
            )
        if self.param_dtype == "bf16" and self.compute_dtype not in ("auto", "bf16"):
            raise ValueError(
                f"mixed_precision.param_dtype '{self.compute_dtype}' over param_dtype 'bf16': "
                "set param_dtype = 'fp32'."
            )
        # Not whether it is set: a resolved config, as a run folder and the workers have it, sets every key.
        if self.loss_scale != LOSS_SCALE and self.compute_dtype != "fp16":
            raise ValueError("loss_scale has no effect without mixed_precision.param_dtype = 'fp16'.")
        return self
