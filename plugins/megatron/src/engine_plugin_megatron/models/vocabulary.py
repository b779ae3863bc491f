"""Vocabularies that tensor parallelism does not divide: rows of padding that never take part.

Padding logits are made so small that their probability is 0 whatever the temperature: neither a log-prob nor an entropy
nor a gradient knows of them. Their rows are zero and stay zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear

PADDING_LOGIT = -3e4  # fits float16; finite, as 0 * log 0 of an entropy would be NaN


def padded_vocabulary(size: int, tp: int) -> int:
    """The least multiple of ``tp`` that holds the vocabulary."""
    return -(-size // tp) * tp


def hide_padding(layer: ColumnParallelLinear, vocabulary: int) -> None:
    """From now on the layer gives ``PADDING_LOGIT`` for rows behind the vocabulary.

    Args:
        layer: of the last stage; its output is this rank's part of the logits, or (gathered) all of them.
        vocabulary: rows of the model's own.
    """
    if layer.output_size == vocabulary:
        return
    begins = layer.output_size_per_partition * torch.distributed.get_rank(layer.tp_group)

    def hide(module: Any, inputs: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        logits, bias = output
        first = vocabulary - (begins if logits.shape[-1] < layer.output_size else 0)
        if first < logits.shape[-1]:
            logits[..., max(first, 0) :] = PADDING_LOGIT
        return logits, bias

    layer.register_forward_hook(hide)
