"""Parts of a decoder that megatron-core lacks without Transformer Engine, or computes otherwise than transformers.

**Norms.** With `sequence_parallel` each tensor-parallel rank normalizes its own tokens, so its gradient of the norm's
weight is only a part of the sum. Megatron sums the gradients of parameters that are marked ``sequence_parallel``. An
unmarked parameter would silently train with a wrong gradient. Megatron's ``WrappedTorchNorm`` refuses sequence
parallelism.

**Padding of vocabularies** that tensor parallelism does not divide. Padding logits are so small that their probability
is 0 at any temperature, so they do not affect log-probs, entropies or gradients. The padding rows are zero and stay
zero.

**The padding token.** transformers' embeddings have ``padding_idx``: the row of `pad_token_id` gets no gradient from
the tokens of a sequence, not even where the token was sampled. Only a tied output layer gives it a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """The norm ``x / sqrt(mean(x^2) + eps) * (offset + weight)``; its weight is marked ``sequence_parallel`` as in the config.

    Args:
        config: the model's config, with its ``architecture``.
        hidden_size: the width.
        eps: added below the root.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.offset: float = config.architecture.norm_offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., H]; with an offset in float32, as transformers does."""
        if not self.offset:
            return super().forward(x)
        found = F.rms_norm(x.float(), self.normalized_shape, self.offset + self.weight.float(), self.eps)
        return found.type_as(x)


class HeadNorm(torch.nn.RMSNorm):
    """The norm of each head's queries or keys. Ranks have different heads; Megatron sums these gradients by name."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class Router(TopKRouter):
    """Megatron's ``TopKRouter`` with another matrix product: that of 0.16.1 needs a function of Transformer Engine.

    Scores are computed in the type of the hidden states, as transformers and samplers do.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Return the experts' scores [..., E] of hidden states [..., H]."""
        return F.linear(input, self.weight, self.bias)


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


def scale_embeddings(layer: VocabParallelEmbedding, factor: float) -> None:
    """Add a hook to the embedding that multiplies its output with a factor, rounded to the embedding's type."""

    def scaled(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the scaled embeddings [..., H]."""
        return output * torch.tensor(factor, dtype=output.dtype, device=output.device)

    layer.register_forward_hook(scaled)


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


@dataclass
class Stretch(PackedSeqParams):
    """A rank's part of a pack whose tokens several ranks share (`cp`).

    ``cu_seqlens_q`` holds the boundaries of the whole pack's sequences, for attention. ``cu_seqlens_q_padded``, which
    megatron-core's rotary embedding prefers, describes the part as one sequence.
    """

    positions: Tensor | None = None  # [T / cp] each token's position in its sequence


class StretchRotary(nn.Module):
    """A rotary embedding of given positions; those of megatron-core's ``RotaryEmbedding`` begin at 0 in each sequence.

    Args:
        inverse_frequencies: [dim / 2].
    """

    def __init__(self, inverse_frequencies: Tensor) -> None:
        super().__init__()
        self.inv_freq = inverse_frequencies  # moved at its first use; like megatron-core's, not a buffer

    def get_rotary_seq_len(self, *of: Any, **named: Any) -> Tensor:
        """Return the positions [T / cp] of this rank's tokens, which the model passes to ``forward``."""
        stretch = next(value for value in (*of, *named.values()) if isinstance(value, Stretch))
        assert stretch.positions is not None
        return stretch.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """Return the angles [n, 1, 1, dim] of positions [n]."""
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = torch.outer(positions.float(), self.inv_freq)
        return torch.cat([angles, angles], dim=-1)[:, None, None]
