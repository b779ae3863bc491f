"""The router of a mixture of experts without Transformer Engine."""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class Router(TopKRouter):
    """Megatron's ``TopKRouter`` with another matrix product: that of 0.16.1 needs a function of Transformer Engine.

    Scores are computed in the type of the hidden states, as transformers and samplers do.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Return the experts' scores [..., E] of hidden states [..., H]."""
        return F.linear(input, self.weight, self.bias)
