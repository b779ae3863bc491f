"""Estimates of the memory of one rank under ZeRO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_plugin_deepspeed.partitions import shape_of
from engine_plugin_torch.data_parallel import SharedBudget
from engine_plugin_torch.memory import Held
from engine_plugin_torch.units import decoder_layers

if TYPE_CHECKING:
    from torch import nn

    from engine_plugin_deepspeed.engine import DeepSpeedEngine
    from engine_plugin_deepspeed.options import DeepSpeedOptions
    from engine_plugin_torch.precision import Precision


MASTER_BYTES = 12  # per weight: float32 copy and two moments
GATHERED_UNITS = 2  # the current layer, and the prefetched next one


class DeepSpeedBudget(SharedBudget):
    """The memory budget of a rank under ZeRO."""

    engine: DeepSpeedEngine

    @classmethod
    def held_by(
        cls, module: nn.Module, trained: bool, options: Any, types: Precision, ranks: int, role: str
    ) -> Held:
        """Return the bytes of a rank's weights, gradients and optimizer state under ZeRO."""
        return held_by_rank(module, options, types, ranks, trained)

    @property
    def retries(self) -> bool:  # type: ignore[override]
        """False under ZeRO: a failed attempt's gradients stay in DeepSpeed's buffers and would count twice."""
        return self.engine.zero is None


def held_by_rank(
    module: nn.Module, options: DeepSpeedOptions, precision: Precision, size: int, trained: bool
) -> Held:
    """Return the estimated bytes on one rank.

    Args:
        module: the model, partitioned or not; sizes of whole weights are used.
        size: ranks of the role.
        trained: the role is trained, so its gradients and optimizer state count.
    """
    count = sum(shape_of(p).numel() for p in module.parameters())
    learned = sum(shape_of(p).numel() for p in module.parameters() if p.requires_grad) if trained else 0
    stage, item = options.stage, precision.compute.itemsize
    if stage == 0:
        return Held(count * precision.param.itemsize, learned * 4, learned * 8)
    weights = count * item // (size if stage == 3 else 1)
    if options.offload_param.device != "none":
        weights = 0
    # below stage 3, a micro-batch's gradients are whole until they are reduced
    gradients = learned * 4 // size if stage == 3 else learned * item
    optimizer = 0 if options.offload_optimizer.device != "none" else learned * MASTER_BYTES // size
    gathered = 0
    if stage == 3:
        layers = [module.get_submodule(name) for name in decoder_layers(module)]
        sizes = [sum(shape_of(p).numel() for p in layer.parameters()) for layer in layers]
        gathered = min(count, count - sum(sizes) + max(sizes, default=0) * GATHERED_UNITS) * item
    return Held(weights, gradients, optimizer, gathered)
