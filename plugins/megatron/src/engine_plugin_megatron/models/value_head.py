"""The head of critics and reward models: one number a token, in the place of the output layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(torch.nn.Module):
    """``h @ weight``: [tokens, batch, hidden] to [tokens, batch, 1], the same on every tensor-parallel rank.

    With sequence parallelism each rank comes with its own tokens; they are gathered first, so the loss is computed by
    every rank on all tokens, and the gradient of the weight is whole on each.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return F.linear(hidden, self.weight), None
