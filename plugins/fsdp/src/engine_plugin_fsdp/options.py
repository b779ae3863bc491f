"""The option table ``[actor.fsdp]`` (no torch here, because ``engine validate`` reads it)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from engine_core.specs import Options
from engine_plugin_torch.options import ForwardOptions

FloatType = Literal["fp32", "bf16", "fp16"]


class WrapOptions(Options):
    """``[actor.fsdp.wrap]``: the submodules that form one unit. A unit is gathered and freed together. The hook ``engine_wrap_policy`` of a plugin has priority over this table."""

    layer_classes: list[str] = []
    """Class names of the submodules that are units, ``["Qwen3DecoderLayer"]``. Empty: the decoder layers."""
    layers_per_unit: int = Field(default=1, gt=0)
    """Number of neighboring layers that are gathered as one unit. A larger number gives fewer and larger messages and uses more memory."""


class MixedPrecision(Options):
    """``[actor.fsdp.mixed_precision]``: types of computation and communication. The kept weights have `param_dtype` of the table above."""

    param_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of gathered weights and of the forward pass. ``auto``: bf16 if the accelerator supports it or the kept weights are bf16, else fp32. Log-probs are always float32. ``fp16`` scales the loss, see `loss_scale`."""
    reduce_dtype: FloatType = "fp32"
    """Type in which gradients are summed over ranks."""


class FSDPOptions(ForwardOptions):
    """``[actor.fsdp]``: the model is sharded over ranks with FSDP2."""

    sharding: Literal["full", "grad_op", "hybrid", "none"] = "full"
    """``full``: weights, gradients and optimizer state are sharded over all ranks (ZeRO-3). ``grad_op``: weights stay gathered between forward and backward pass (ZeRO-2); this is faster and uses more memory. ``hybrid``: ``full`` inside groups of `shard_group_size` ranks, with a copy in each group. ``none``: every rank holds the whole model."""
    shard_group_size: int = Field(default=0, ge=0)
    """Number of ranks in one group of ``hybrid``; 0: the ranks of one host."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Free the weights of a unit after its forward pass and gather them again for its backward pass. ``auto``: true with ``full`` and ``hybrid``. ``false`` uses more memory and sends fewer messages: ``full`` then becomes ``grad_op``, and ``hybrid`` keeps weights gathered between the passes. The last unit, embeddings and head always stay gathered, because the backward pass begins with them."""
    wrap: WrapOptions = WrapOptions()
    """What is gathered at one time."""
    param_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the kept weights and of the optimizer state. ``auto``: fp32, but the type of the forward pass, bf16 or fp16, for a frozen role and for the model below an adapter on an accelerator."""
    mixed_precision: MixedPrecision = MixedPrecision()
    """Types of what is computed and sent."""
    fp8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Multiply in 8 bits in large linear layers, except the head. Needs a GPU with 8-bit support: Hopper, or Ada for ``tensorwise``. ``tensorwise``: one scale for each tensor (fastest). ``rowwise``: one scale for each row (more exact). ``rowwise_with_gw_hp``: ``rowwise``, but the gradient of the weight is computed in bf16. Needs ``pip install 'engine-plugin-fsdp[fp8]'``."""
    gradient_sync: Literal["auto", "last", "each"] = "auto"
    """``last``: sum gradients over ranks after the last micro-batch. This sends fewer messages; until then each rank holds whole gradients. ``each``: sum after each micro-batch, which uses the least memory. ``auto``: ``each`` if the memory plan would recompute activations otherwise, or if whole gradients do not fit; else ``last``."""
    cpu_offload: Literal["none", "optimizer", "params"] = "none"
    """``optimizer``: the optimizer state is in host memory between steps. ``params``: weights, gradients and optimizer state are in host memory; the optimizer step runs on the CPU, and each unit is copied to the device when it is used."""
    activation_checkpointing: Literal["none", "full", "auto"] | Annotated[int, Field(gt=0)] = "auto"
    """``full``: recompute the activations of each unit in the backward pass. Recomputation uses less memory and takes about a quarter more time. A number n: recompute the activations of every n-th unit. ``auto``: ``full`` if `max_tokens_per_rank` tokens (8192 if that key is ``auto``), or the longest sequence, would not fit otherwise, by an estimate; never on the CPU."""
    activation_offload: bool = False
    """Keep the activations of each unit in host memory until its backward pass."""
    sp: int = Field(default=1, gt=0)
    """Number of ranks that share the tokens of each micro-batch (sequence parallelism). Use it for sequences that do not fit on one rank. The value must divide the model's query heads and the number of ranks, and divide the key-value heads or be a multiple of them."""
    tp: int = Field(default=1, gt=0)
    """Number of ranks that share the heads and the wide dimension of each layer (tensor parallelism). Use it for layers that do not fit on one rank or take too long. The ranks are neighbors and should be on one host. The value must divide the model's heads, its key-value heads, and (together with `sp`) the number of ranks."""
    loading: Literal["auto", "broadcast", "sharded", "every_rank"] = "auto"
    """How the model folder is read. ``sharded``: each rank reads only its shard from a folder of safetensors, which must exist on every machine. ``broadcast``: the first rank reads the folder and sends each tensor to the other ranks, which never hold the whole model. ``every_rank``: each rank reads the whole folder. ``auto``: ``broadcast`` if the core builds the model."""
    probe: bool | Literal["auto"] = "auto"
    """Check the sharded model at the start. The sharded model computes 16 tokens. The run is refused if the result differs from that of the whole model on the first rank's CPU. ``auto``: check on several ranks, for a model of at most 2 billion parameters whose attention runs on a CPU."""
    weights_bucket_mb: int = Field(default=256, gt=0)
    """Maximum size, in MiB, of a bucket of gathered tensors when weights are sent to a sampler or written to a file."""

    fp16_key: ClassVar[str] = "mixed_precision.param_dtype"

    @property
    def compute_dtype(self) -> Literal["auto", "fp32", "bf16", "fp16"]:
        """Type of the forward pass, by the name that the core asks for."""
        return self.mixed_precision.param_dtype

    @property
    def keeps_gathered(self) -> bool:
        """Whether weights stay whole from the forward to the backward pass."""
        return self.sharding in ("grad_op", "none") or self.reshard_after_forward is False

    def compiles(self, accelerator: bool, quantized: bool) -> bool:
        """Return whether forward passes are compiled; ranks that share a sequence or a layer compile nothing."""
        return super().compiles(accelerator, quantized) and self.sp == self.tp == 1

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
            if ranks > 1 and self.compile is True:
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
        return self
