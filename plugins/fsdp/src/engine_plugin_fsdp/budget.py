"""The memory budget of one rank of a model that is sharded over ranks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from engine_plugin_fsdp.ranks import mesh_shape
from engine_plugin_torch.data_parallel import SharedBudget
from engine_plugin_torch.memory import Held, Settings
from engine_plugin_torch.precision import NAMED
from engine_plugin_torch.units import decoder_layers

if TYPE_CHECKING:
    from torch import nn

    from engine_core.types import Batch
    from engine_plugin_fsdp.engine import FSDPEngine
    from engine_plugin_fsdp.options import FSDPOptions
    from engine_plugin_torch.precision import Precision

GATHERED_UNITS = 2  # the unit that computes, and the next one


class FSDPBudget(SharedBudget):
    """The memory budget of a rank that holds a part of the model."""

    engine: FSDPEngine
    RECOMPUTATION = ("none", "full")

    @classmethod
    def held_by(
        cls, module: nn.Module, trained: bool, options: Any, types: Precision, ranks: int, role: str
    ) -> Held:
        """Return the bytes that a rank holds of the sharded model."""
        return held_by_rank(Held.of(module, trained), module, options, types, ranks, role)

    @classmethod
    def settings_of(
        cls, module: nn.Module, options: Any, types: Precision, role: str, compiled: bool, kernel: bool
    ) -> Settings:
        """Return the settings of a role; gathered weights have the compute type, so autocast copies nothing."""
        made = super().settings_of(module, options, types, role, compiled, kernel)
        return dataclasses.replace(made, param=types.compute)

    def halve(self, batch: Batch, error: Exception) -> bool:
        """Halve the token budget as its base does; return False after a backward pass.

        FSDP keeps gradients that it has not reduced yet where they cannot be cleared: a second try would add to them.
        """
        return not self.engine.began_backward and super().halve(batch, error)

    @classmethod
    def variants(cls, options: Any) -> list[tuple[dict[str, Any], Any]]:
        """Return the choices for `gradient_sync` at ``auto``: ``last``, which sends less, then ``each``."""
        if options.gradient_sync != "auto":
            return [({}, options)]
        chosen = [{"gradient_sync": value} for value in ("last", "each")]
        return [(keys, options.model_copy(update=keys)) for keys in chosen]

    @classmethod
    def share_of(cls, options: Any, recomputing: bool) -> float:
        """Return the share of the layers that keep only their input, by `activation_checkpointing`."""
        how = options.activation_checkpointing
        if isinstance(how, int):
            return 1 / how
        return float(recomputing if how == "auto" else how == "full")

    @property
    def token_sharers(self) -> int:
        """Number of ranks that share the tokens of a micro-batch: `sp`."""
        return self.engine.options.sp


def held_by_rank(
    whole: Held, module: nn.Module, options: FSDPOptions, precision: Precision, size: int, role: str
) -> Held:
    """Return the bytes on one rank. With ``tp``, weights that are not split by ``tp`` count as if they were.

    Unless `gradient_sync` is ``each``, each rank sums whole gradients until the last micro-batch. They are in
    ``reduce_dtype`` and on the device, even if the weights are offloaded.

    Args:
        whole: bytes of the whole model.
        module: the model, sharded or not.
        options: the role's table.
        precision: the role's types.
        size: number of ranks of the role.
        role: the role's name, for messages.
    """
    shards, tp = mesh_shape(options, size, role)[1] * options.tp, options.tp
    each = options.gradient_sync == "each"
    numbers = whole.gradients // precision.param.itemsize
    sums = numbers * NAMED[options.mixed_precision.reduce_dtype].itemsize // tp
    made = Held(
        whole.weights // shards,
        whole.gradients // shards if each else sums,
        whole.optimizer // shards,
        _gathered(module, options, precision) // tp,
    )
    if options.cpu_offload == "params":
        return dataclasses.replace(made, weights=0, gradients=0 if each else sums, optimizer=0)
    return dataclasses.replace(made, optimizer=0) if options.cpu_offload == "optimizer" else made


def _gathered(module: nn.Module, options: FSDPOptions, precision: Precision) -> int:
    """Return the bytes of the weights that are gathered at one time: some units and the root, in the compute type."""
    layers = [module.get_submodule(name) for name in decoder_layers(module)]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    total = sum(p.numel() for p in module.parameters())
    rest = total - sum(sizes)
    most = max(sizes, default=0) * GATHERED_UNITS * options.wrap.layers_per_unit
    kept = total if options.keeps_gathered else min(total, rest + most)
    return kept * precision.compute.itemsize
