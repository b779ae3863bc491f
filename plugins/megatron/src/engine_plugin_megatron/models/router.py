"""The router of a mixture of experts without Transformer Engine."""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class Router(TopKRouter):
    """Megatron's, whose matrix product (0.16.1) asks for a function of Transformer Engine that is not there without it.

    Scores are computed in the type of the hidden states, as transformers and samplers do.
    """

    def gating(self, input: Tensor) -> Tensor:
        """[..., hidden] to [..., experts]."""
        return F.linear(input, self.weight, self.bias)
