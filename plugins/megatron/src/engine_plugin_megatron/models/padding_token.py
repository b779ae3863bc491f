"""The token of padding as transformers has it: its embedding learns nothing where it is read.

transformers gives its embeddings ``padding_idx``, so that the row of `pad_token_id` has no gradient from tokens of a
sequence (a sampled one counts, too), only from the output layer where that is tied to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import VocabParallelEmbedding


def hold_padding_token(layer: VocabParallelEmbedding, token: int) -> None:
    """From now on the layer gives this token's embedding without a gradient.

    Args:
        layer: [batch, length] ids to [batch, length, hidden]; with sequence parallelism to this rank's
            [length / ranks, batch, hidden].
        token: `pad_token_id`.
    """

    def held(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        padding = inputs[0] == token
        if module.reduce_scatter_embeddings:
            padding = padding.T.chunk(module.tp_group.size())[module.tp_group.rank()]
        return torch.where(padding[..., None], output.detach(), output)

    layer.register_forward_hook(held)
