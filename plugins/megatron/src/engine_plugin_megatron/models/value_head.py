"""The value head of critics and reward models: one number per token, instead of the output layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(torch.nn.Module):
    """A linear layer ``h @ weight``: [tokens, batch, hidden] to [tokens, batch, 1], equal on all tensor-parallel ranks.

    With sequence parallelism each rank has a part of the tokens. They are gathered first, so every rank computes the
    loss on all tokens and has the weight's whole gradient.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Return values [tokens, batch, 1] of hidden states [tokens, batch, H], and None for the bias."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return F.linear(hidden, self.weight), None
