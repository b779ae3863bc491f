"""Core attention for megatron-core without Transformer Engine: packed sequences (``thd``) and rectangles (``sbhd``).

Megatron's local ``DotProductAttention`` refuses packed sequences. This module uses ``varlen`` of
``engine_plugin_torch.attention``: ``torch.nn.attention.varlen`` on CUDA in half precision, scaled dot-product attention
elsewhere. Ranks that share tokens (`cp`) exchange tokens for heads, as DeepSpeed-Ulysses does: each computes attention
of whole sequences for its share of the heads, so results do not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from engine_plugin_megatron.ranks import token_group
from engine_plugin_torch.attention import varlen
from engine_plugin_torch.rank_group import Exchange

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

# boundaries on the host -> a copy on the device, for every layer of a pack
_ON_DEVICE = WeakTensorKeyDictionary()


class PackedAttention(torch.nn.Module):
    """Causal grouped-query attention.

    ``cu_seqlens_q`` may be on the CPU, where Megatron's rotary embedding reads it without waiting for the device.

    Args:
        config: the model's config.
        softmax_scale: factor of the scores; by default ``1 / sqrt(head width)``.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.sharers = token_group()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Return attention of this rank's heads.

        Args:
            query: [T, heads, dim] of a pack (with `cp`, of this rank's part of it), else [length, batch, heads, dim].
            key: [T, groups, dim] or [length, batch, groups, dim].
            value: like ``key``.
            attention_mask: must be None: all attention here is causal, and padding comes after valid tokens.
            packed_seq_params: the boundaries of a pack's sequences; None for rectangles.

        Returns:
            [T, heads * dim] or [length, batch, heads * dim].

        Raises:
            ValueError: an ``attention_mask`` is given.
        """
        if attention_mask is not None:
            raise ValueError("attention here is causal and takes no attention_mask: give None")
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            shared = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=shared)
            return out.permute(2, 0, 1, 3).flatten(2)
        if self.sharers is not None:
            key, value = (_for_sharers(x, query.shape[1], self.sharers.size()) for x in (key, value))
            query, key, value = (Exchange.apply(x, self.sharers, 1, 0) for x in (query, key, value))
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out, _none = varlen(
            self,
            q,
            k,
            v,
            None,
            scaling=self.scale,
            cu_seq_lens_q=_boundaries(packed_seq_params.cu_seqlens_q, query.device),
            max_length_q=packed_seq_params.max_seqlen_q,
        )
        found: Tensor = out[0] if self.sharers is None else Exchange.apply(out[0], self.sharers, 0, 1)
        return found.flatten(1)


def _for_sharers(keys: Tensor, heads: int, size: int) -> Tensor:
    """Return keys or values [T, groups, dim], repeated to [T, heads, dim] where ``size`` ranks cannot divide groups."""
    groups = keys.shape[1]
    return keys if groups % size == 0 else keys.repeat_interleave(heads // groups, dim=1)


def _boundaries(cu: Tensor, device: torch.device) -> Tensor:
    if cu.device == device:
        return cu
    if cu not in _ON_DEVICE:
        _ON_DEVICE[cu] = cu.to(device, non_blocking=True)
    return _ON_DEVICE[cu]
