"""RMS norm of a decoder layer, which megatron-core without Transformer Engine has not for sequence parallelism.

With `sequence_parallel` each tensor-parallel rank norms its own tokens, so the gradient of the norm's weight is
a part of the sum. Megatron sums those of parameters that are marked ``sequence_parallel``; one that is not marked
trains with a wrong gradient, and nothing tells. Its own ``WrappedTorchNorm`` refuses sequence parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * weight``; its weight says whether it sees a part of the tokens.

    Args:
        config: of the model.
        hidden_size: width.
        eps: below the root.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class HeadNorm(torch.nn.RMSNorm):
    """The norm of each head's queries or keys. Ranks have other heads of all tokens: Megatron sums these by their names."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
