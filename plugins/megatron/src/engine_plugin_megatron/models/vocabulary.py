"""Padding of vocabularies that tensor parallelism does not divide.

Padding logits are so small that their probability is 0 at any temperature, so they do not affect log-probs, entropies
or gradients. The padding rows are zero and stay zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear

PADDING_LOGIT = -3e4  # fits float16; finite, as 0 * log 0 of an entropy would be NaN


def padded_vocabulary(size: int, tp: int) -> int:
    """Return the vocabulary's size, rounded up to a multiple of ``tp``."""
    return -(-size // tp) * tp


def hide_padding(layer: ColumnParallelLinear, vocabulary: int) -> None:
    """Add a hook to the output layer that sets the logits of padding tokens to ``PADDING_LOGIT``.

    Args:
        layer: the output layer; it returns this rank's part of the logits, or (gathered) all of them.
        vocabulary: the vocabulary's size without padding.
    """
    if layer.output_size == vocabulary:
        return
    begins = layer.output_size_per_partition * torch.distributed.get_rank(layer.tp_group)

    def hide(module: Any, inputs: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """Set padding logits in place; logits are [..., V / ranks], or [..., V] where gathered."""
        logits, bias = output
        first = vocabulary - (begins if logits.shape[-1] < layer.output_size else 0)
        if first < logits.shape[-1]:
            logits[..., max(first, 0) :] = PADDING_LOGIT
        return logits, bias

    layer.register_forward_hook(hide)
