"""The padding token as in transformers: its embedding gets no gradient from input tokens.

transformers' embeddings have ``padding_idx``: the row of `pad_token_id` gets no gradient from the tokens of a sequence,
not even where the token was sampled. Only a tied output layer gives it a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import VocabParallelEmbedding


def hold_padding_token(layer: VocabParallelEmbedding, token: int) -> None:
    """Add a hook to the embedding that detaches this token's embeddings.

    Args:
        layer: the embedding, from ids [batch, length] to [batch, length, hidden], or with sequence parallelism to this
            rank's [length / ranks, batch, hidden].
        token: `pad_token_id`.
    """

    def held(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the embeddings [batch, length, H] (or as sharded), detached where the id is the padding token."""
        padding = inputs[0] == token
        if module.reduce_scatter_embeddings:
            padding = padding.T.chunk(module.tp_group.size())[module.tp_group.rank()]
        return torch.where(padding[..., None], output.detach(), output)

    layer.register_forward_hook(held)
