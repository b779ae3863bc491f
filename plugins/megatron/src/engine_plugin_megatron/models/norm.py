"""RMS norm of a decoder layer with sequence parallelism, which megatron-core lacks without Transformer Engine.

With `sequence_parallel` each tensor-parallel rank normalizes its own tokens, so its gradient of the norm's weight is
only a part of the sum. Megatron sums the gradients of parameters that are marked ``sequence_parallel``. An unmarked
parameter would silently train with a wrong gradient. Megatron's ``WrappedTorchNorm`` refuses sequence parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """The norm ``x / sqrt(mean(x^2) + eps) * weight``, whose weight is marked ``sequence_parallel`` as in the config.

    Args:
        config: the model's config.
        hidden_size: the width.
        eps: added below the root.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class HeadNorm(torch.nn.RMSNorm):
    """The norm of each head's queries or keys. Ranks have different heads; Megatron sums these gradients by name."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
