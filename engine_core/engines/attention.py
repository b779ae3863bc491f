"""Attention ``varlen`` for transformers models: packed sequences that never see each other.

Sequences of one pack are told apart by ``cu_seq_lens_q`` (the convention of flash attention):

* on CUDA in half precision: ``torch.nn.attention.varlen``;
* elsewhere: sequences of similar length are padded on the right to one rectangle and go through
  causal ``scaled_dot_product_attention`` together. A valid row never looks at the padding behind
  it, so no mask is needed. For 256 sequences of 40 tokens this is 3 times as fast (forward and
  backward) as one call a sequence.

Without ``cu_seq_lens_q`` (sampling with a cache, padded batches) it is transformers' ``sdpa``,
mask included. Sliding windows and score soft-capping are honoured; attention sinks are refused.

The only module of the core with a CUDA-only call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from engine_core.errors import ConfigError, did_you_mean

PACKABLE = frozenset(
    {
        "varlen",
        "sdpa",
        "eager",
        "flex_attention",
        "flash_attention_2",
        "flash_attention_3",
        "flash_attention_4",
    }
)
"""Values of ``[model] attention`` that keep packed sequences apart: by ``cu_seq_lens_q``, or because
transformers sees positions that begin again (only without an attention mask and without a cache)."""

SIMILAR = 0.8  # a rectangle holds sequences at least this share of its longest

_PACKED: ContextVar[bool] = ContextVar("packed", default=False)
_PLANS = WeakTensorKeyDictionary()  # cu_seq_lens -> rectangles: made once, used by every layer


@dataclass(frozen=True)
class Rectangle:
    """Sequences of similar length: how to gather them from a pack and put them back."""

    gather: Tensor  # [n * length] position in the pack of each cell; padding repeats the last token
    valid: Tensor  # cells that are not padding
    count: int  # n
    length: int


@dataclass(frozen=True)
class Plan:
    """A pack as rectangles; ``order`` brings their valid cells, one after another, back in place."""

    rectangles: list[Rectangle]
    order: Tensor


def check_attention(name: str, device: torch.device) -> None:
    """Refuse an attention implementation that would mix packed sequences, or cannot train."""
    if name not in PACKABLE:
        raise ConfigError(
            f"model.attention is '{name}', which is not known to keep packed sequences apart."
            + did_you_mean(name, PACKABLE)
        )
    if name == "flex_attention" and device.type == "cpu":
        raise ConfigError("model.attention 'flex_attention' has no backward pass on the CPU. Use 'varlen'.")


@contextlib.contextmanager
def packed() -> Iterator[None]:
    """Inside, ``varlen`` builds no [T, T] mask: the sequences are told apart by ``cu_seq_lens_q``."""
    token = _PACKED.set(True)
    try:
        yield
    finally:
        _PACKED.reset(token)


def is_packed() -> bool:
    """Whether a packed forward pass runs here."""
    return _PACKED.get()


def packed_arguments(lengths: Tensor, device: torch.device) -> dict[str, Any]:
    """Keyword arguments by which attention tells packed sequences apart.

    Args:
        lengths: [n] tokens of each sequence, on the CPU.
    """
    boundaries = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    longest = int(lengths.max())
    on_device = boundaries.to(device)
    _PLANS[on_device] = _plan(boundaries.tolist(), device)
    return {
        "cu_seq_lens_q": on_device,
        "cu_seq_lens_k": on_device,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention in transformers' signature.

    Args:
        query: [batch, heads, length, dim]; with ``cu_seq_lens_q`` the batch is 1 and length is T.
        key: [batch, kv_heads, length, dim]; ``value`` alike.
        cu_seq_lens_q: [n + 1] int32, where each packed sequence begins and ends.
        max_length_q: tokens of the longest one.

    Returns:
        [batch, length, heads, dim].
    """
    if s_aux is not None:
        raise ConfigError(
            "model.attention 'varlen' has no attention sinks, which this model needs. Use 'eager'."
        )
    if cu_seq_lens_q is None:
        if softcap is not None:
            mask = _causal(query.shape[2], query.device) if attention_mask is None else attention_mask
            return _explicit(query, key, value, mask, scaling, softcap).transpose(1, 2).contiguous(), None
        if query.shape[2] == 1 and kwargs.get("position_bias") is None:
            return _one_token(query, key, value, attention_mask, scaling), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16) and softcap is None:
        longest = max_length_q or int(cu_seq_lens_q.diff().max())
        return _cuda(query, key, value, cu_seq_lens_q, longest, scaling, sliding_window), None
    return _rectangles(query, key, value, cu_seq_lens_q, scaling, sliding_window, softcap), None


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """One new token a row, as in sampling: query heads with common keys stand as rows, and no key is copied."""
    rows = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # [batch, kv_heads, heads of each, dim]
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.flatten(1, 2)[:, None]


def varlen_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask for a pack, else that of ``sdpa``."""
    return None if _PACKED.get() else sdpa_mask(*args, **kwargs)


AttentionInterface.register("varlen", varlen)
AttentionMaskInterface.register("varlen", varlen_mask)


def _cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, dim]
    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # torch 2.11 has no enable_gqa here
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    reach = (-1 if window is None else window - 1, 0)  # tokens seen to the left and to the right
    out: Any = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scaling, window_size=reach)
    return out[None]


def _plan(boundaries: list[int], device: torch.device) -> Plan:
    """Group sequences by length, the longest first."""
    spans = [(end - start, start) for start, end in pairwise(boundaries) if end > start]
    groups: list[list[tuple[int, int]]] = []
    for span in sorted(spans, reverse=True):
        if not groups or span[0] < SIMILAR * groups[-1][0][0]:
            groups.append([])
        groups[-1].append(span)
    rectangles = [_rectangle(group) for group in groups]
    order = torch.argsort(torch.cat([r.gather[r.valid] for r in rectangles]))
    moved = [Rectangle(r.gather.to(device), r.valid.to(device), r.count, r.length) for r in rectangles]
    return Plan(moved, order.to(device))


def _rectangle(spans: list[tuple[int, int]]) -> Rectangle:
    lengths, starts = torch.tensor(spans)[:, :, None].unbind(1)  # [n, 1] each
    column = torch.arange(spans[0][0])[None]
    gather = starts + torch.minimum(column, lengths - 1)
    valid = (column < lengths).flatten().nonzero().squeeze(1)
    return Rectangle(gather.flatten(), valid, len(spans), spans[0][0])


def _rectangles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    plan = _PLANS.get(cu, None)
    if plan is None:
        plan = _PLANS[cu] = _plan(cu.tolist(), query.device)
    rows = []
    for part in plan.rectangles:
        q, k, v = (
            x[0].index_select(1, part.gather).unflatten(1, (part.count, part.length)).transpose(0, 1)
            for x in (query, key, value)
        )  # [n, heads, length, dim]
        sees_all = window is None or window >= part.length
        mask = None if sees_all else _causal(part.length, query.device, window)
        if softcap is not None:
            out = _explicit(q, k, v, _causal(part.length, query.device, window), scaling, softcap)
        else:
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        rows.append(out.transpose(1, 2).flatten(0, 1).index_select(0, part.valid))
    return torch.cat(rows).index_select(0, plan.order)[None]


def _causal(length: int, device: torch.device, window: int | None = None) -> Tensor:
    """[length, length] bool, True where a row sees a column."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def _explicit(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    """softmax(cap * tanh(scores / cap)) values, for which torch has no fused kernel. [n, heads, length, dim]"""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    blocked = ~mask if mask.dtype == torch.bool else mask < 0
    scores = scores.float().masked_fill(blocked, torch.finfo(torch.float32).min)
    return scores.softmax(-1).to(query.dtype) @ value
