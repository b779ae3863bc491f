"""Attention ``varlen`` for transformers models: packed sequences that never attend to each other.

``cu_seq_lens_q`` (the convention of flash attention) gives the boundaries of the sequences in a pack:

* on CUDA in half precision: ``torch.nn.attention.varlen``;
* elsewhere: sequences of similar length are padded on the right to one rectangle and go through
  causal ``scaled_dot_product_attention`` together. A valid row never attends to the padding behind
  it, so no mask is needed. For 256 sequences of 40 tokens, rectangles are 3 times as fast (forward
  and backward) as one call per sequence. A pack may hold the tokens of a shared prefix once
  (``find_prefixes``): they are gathered for each sequence that begins with them.

Without ``cu_seq_lens_q`` (sampling with a cache, padded batches) it is transformers' ``sdpa``,
mask included. Sliding windows and score soft-capping are supported; attention sinks are refused. A model
that applies its window in the mask alone is not packed (``watch_windows``): a pack has no mask.

``choose_attention`` checks ``[model] attention`` and gives ``auto`` its meaning:

| model | ``auto`` |
|---|---|
| attends through transformers' interface, no recurrent layers | ``varlen``; on a CUDA device without torch's kernel ``sdpa`` |
| recurrent layers, attention in chunks, longrope: sequences go through it one at a time | ``sdpa`` |
| custom attention code | ``sdpa``, or ``eager`` where it has none |
| no fused attention at all (attention sinks) | ``eager`` |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from engine_core.errors import ConfigError, did_you_mean
from engine_plugin_torch.transfer import send

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from engine_core.config import ModelConfig

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

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
"""Types of layers that ``varlen`` computes."""
PACKAGES = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
"""Attention -> the distribution that has its kernels."""

KERNEL_CAPABILITY = (8, 0)  # least compute capability for torch's kernel for packed sequences
KERNEL_HEAD = 256  # largest head size of that kernel
SIMILAR = 0.8  # a sequence in a rectangle has at least this share of the longest one's length

_MASKLESS: set[str] = set()  # names of attention implementations for which a pack needs no mask
_PACKED: ContextVar[bool] = ContextVar("packed", default=False)
_WINDOWS: ContextVar[dict[int, bool] | None] = ContextVar("windows", default=None)  # of ``watch_windows``
_PLANS = WeakTensorKeyDictionary()  # cu_seq_lens -> rectangles: made once, used by every layer


@dataclass(frozen=True)
class Rectangle:
    """Sequences of similar length: how to gather them from a pack and put them back."""

    gather: Tensor  #: [n * length] row of each cell; padding repeats the last token
    valid: Tensor  #: cells that are not padding
    count: int  #: n
    length: int  #: tokens of the longest sequence


@dataclass(frozen=True)
class Plan:
    """A pack as rectangles; ``order`` restores the order of the pack from the concatenated valid cells."""

    rectangles: list[Rectangle]  #: together all sequences of the pack
    order: Tensor  #: [T] position of each token of the pack among the valid cells


@dataclass(frozen=True)
class Prefixes:
    """The tokens of a pack that are computed: of equal tokens behind equal prefixes only the first. In host memory."""

    kept: Tensor  #: [K] positions in the pack of the computed tokens
    row: Tensor  #: [T] index into ``kept`` of each token, or of the equal token that is computed for it


def find_prefixes(token_ids: Tensor, lengths: Tensor) -> Prefixes | None:
    """Find the prefix that each sequence shares with the one before it, such as the prompt of a group.

    A token's hidden state depends only on the tokens up to it, so equal prefixes have equal hidden states. With 8
    responses of 64 tokens to a prompt of 32 tokens, 544 of 768 tokens are computed.

    Args:
        token_ids: [T] of a pack, in host memory.
        lengths: [n] tokens of each sequence, in host memory.

    Returns:
        The tokens to compute; None where no sequence shares a prefix.
    """
    sizes = lengths.tolist()
    first = torch.arange(len(token_ids))  # position of the token that is computed for each token
    for (before, ids), (known, own) in zip(
        pairwise(token_ids.split(sizes)), pairwise(first.split(sizes)), strict=True
    ):
        most = min(len(before), len(ids))
        common = int((before[:most] == ids[:most]).long().cumprod(0).sum())
        own[:common] = known[:common]
    kept, row = first.unique(return_inverse=True)
    return Prefixes(kept, row) if len(kept) < len(first) else None


def check_attention(name: str, device: torch.device) -> None:
    """Refuse an attention implementation that would mix packed sequences, or cannot train.

    Raises:
        ConfigError: ``name`` is such an implementation.
    """
    if name not in PACKABLE:
        raise ConfigError(
            f"model.attention is '{name}', which is not known to keep packed sequences apart."
            + did_you_mean(name, PACKABLE)
        )
    if name == "flex_attention" and device.type == "cpu":
        raise ConfigError("model.attention 'flex_attention' has no backward pass on the CPU. Use 'varlen'.")


@contextlib.contextmanager
def packed() -> Iterator[None]:
    """Make ``varlen`` build no [T, T] mask within the context: ``cu_seq_lens_q`` separates the sequences."""
    token = _PACKED.set(True)
    try:
        yield
    finally:
        _PACKED.reset(token)


def is_packed() -> bool:
    """Return whether a packed forward pass runs in this context."""
    return _PACKED.get()


@contextlib.contextmanager
def watch_windows() -> Iterator[dict[int, bool]]:
    """Yield, by the sliding windows of masks in the context, whether ``varlen`` got the window too.

    Only forward passes that are not packed are watched: those of packs have no mask.
    """
    windows: dict[int, bool] = {}
    token = _WINDOWS.set(windows)
    try:
        yield windows
    finally:
        _WINDOWS.reset(token)


def packed_arguments(
    lengths: Tensor, device: torch.device, name: str | None = None, prefixes: Prefixes | None = None
) -> dict[str, Any]:
    """Return the keyword arguments by which attention separates packed sequences.

    Args:
        lengths: ``[N]`` tokens of each sequence, on the CPU.
        device: the device that attention runs on.
        name: name of the attention. A registered one gets an empty mask, which it ignores. Without a mask transformers
            would look for sequences in the positions, which waits for the device.
        prefixes: the tokens that the pack consists of where prefixes are shared (``varlen`` on the CPU only).
    """
    boundaries = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    longest = int(lengths.max())
    on_device = send(boundaries, device)
    _PLANS[on_device] = _plan(boundaries.tolist(), device, prefixes)
    mask = {"attention_mask": on_device.new_empty(1, 1, 0, 0)} if name in _MASKLESS else {}
    return {
        **mask,
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
    """Compute causal attention with the signature that transformers calls.

    Args:
        query: [batch, heads, length, dim]; with ``cu_seq_lens_q`` the batch is 1 and length is T.
        key: [batch, kv_heads, length, dim]; ``value`` alike.
        cu_seq_lens_q: [n + 1] int32, the boundaries of the packed sequences.
        max_length_q: tokens of the longest one.

    Returns:
        [batch, length, heads, dim].

    Raises:
        ConfigError: the model needs attention sinks.
    """
    if s_aux is not None:
        raise ConfigError(
            "model.attention 'varlen' has no attention sinks, which this model needs. Use 'eager'."
        )
    if cu_seq_lens_q is None:
        if sliding_window is not None and (windows := _WINDOWS.get()) is not None:
            windows[sliding_window] = True
        if softcap is not None:
            mask = _causal(query.shape[2], query.device) if attention_mask is None else attention_mask
            return _explicit(query, key, value, mask, scaling, softcap).transpose(1, 2).contiguous(), None
        if query.shape[2] == 1 and kwargs.get("position_bias") is None:
            return _one_token(query, key, value, attention_mask, scaling), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    query, key, value = _as_computed(query, key, value)
    if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16) and softcap is None:
        longest = max_length_q or int(cu_seq_lens_q.diff().max())
        return _cuda(query, key, value, cu_seq_lens_q, longest, scaling, sliding_window), None
    return _rectangles(query, key, value, cu_seq_lens_q, scaling, sliding_window, softcap), None


def _as_computed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to autocast's type where it is on, as torch's fused attention does; rotary embeddings may give float32."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attend for one new token per sequence, as in sampling, without a copy of the keys.

    Query heads that share a key head become rows of one product.
    """
    rows = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # [batch, kv_heads, heads of each, dim]
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.flatten(1, 2)[:, None]


def varlen_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return None for a pack, else the mask of ``sdpa``: ``[B, 1, queries, keys]`` bool, or None."""
    if _PACKED.get():
        return None
    if (window := kwargs.get("local_size")) is not None and (windows := _WINDOWS.get()) is not None:
        windows.setdefault(window, False)
    return sdpa_mask(*args, **kwargs)


def register(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Register with transformers an attention that separates packed sequences by ``cu_seq_lens_q`` alone.

    ``function`` has the signature and the shapes of ``varlen``: query ``[B, heads, T, dim]``.
    """
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, varlen_mask)
    _MASKLESS.add(name)


register("varlen", varlen)


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


def _plan(boundaries: list[int], device: torch.device, prefixes: Prefixes | None = None) -> Plan:
    """Group sequences by length, the longest first; the rows of a plan are those of the computed tokens."""
    spans = [(end - start, start) for start, end in pairwise(boundaries)]
    groups: list[list[tuple[int, int]]] = []
    for span in sorted((span for span in spans if span[0]), reverse=True):
        if not groups or span[0] < SIMILAR * groups[-1][0][0]:
            groups.append([])
        groups[-1].append(span)
    rectangles, own = [], []
    for group in groups:
        lengths, starts = torch.tensor(group)[:, :, None].unbind(1)  # [n, 1] each
        places = torch.arange(group[0][0])[None]
        gather = (starts + torch.minimum(places, lengths - 1)).flatten()
        valid = (places < lengths).flatten().nonzero().squeeze(1)
        own.append(gather[valid])
        if prefixes is not None:
            gather = prefixes.row[gather]
        rectangles.append(Rectangle(send(gather, device), send(valid, device), len(group), group[0][0]))
    order = torch.argsort(torch.cat(own))
    return Plan(rectangles, send(order if prefixes is None else order[prefixes.kept], device))


@torch.compiler.disable  # a graph would be that of one plan: each pack has another one
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
        q, k, v = (_gathered(x, part.gather, part.count) for x in (query, key, value))
        if softcap is not None:
            out = _explicit(q, k, v, _causal(part.length, query.device, window), scaling, softcap)
        else:
            sees_all = window is None or window >= part.length
            mask = None if sees_all else _causal(part.length, query.device, window)
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


def _gathered(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Gather rows: [1, heads, T, dim] -> [count, heads, cells, dim]."""
    return x[0].index_select(1, rows).unflatten(1, (count, len(rows) // count)).transpose(0, 1)


def _causal(length: int, device: torch.device, window: int | None = None) -> Tensor:
    """Return the causal mask: [length, length] bool, True where a row attends to a column."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def _explicit(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    """Compute ``softmax(cap * tanh(scores / cap)) @ values``: [n, heads, length, dim]; torch has no fused kernel."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    blocked = ~mask if mask.dtype == torch.bool else mask < 0
    scores = scores.float().masked_fill(blocked, torch.finfo(torch.float32).min)
    return scores.softmax(-1).to(query.dtype) @ value


def choose_attention(name: str, config: PretrainedConfig | None, device: torch.device) -> tuple[str, str]:
    """Return the attention implementation of a model and the reason for the choice.

    Args:
        name: value of ``[model] attention``.
        config: the model's config; None where it is not known.
        device: the device that the model runs on.

    Raises:
        ConfigError: the named implementation would mix packed sequences, cannot train, or is not installed.
    """
    if name != "auto":
        check_attention(name, device)
        _check_installed(name, device)
        return name, "model.attention names it"
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) if config is not None else None
    if kind is None:
        return ("sdpa" if config is not None else "varlen"), "the model's class is not known here"
    if not kind._supports_sdpa:
        return "eager", f"{kind.__name__} has no fused attention (attention sinks, or custom code)"
    if getattr(kind, "_is_stateful", False) or not can_pack(config):
        reason = "recurrent layers, attention in chunks or longrope"
        return "sdpa", f"{reason}: one sequence at a time, nothing is packed"
    if not kind._supports_attention_backend:
        return "sdpa", f"{kind.__name__} has custom attention code"
    if device.type != "cuda":
        return "varlen", "packed sequences as rectangles of similar lengths, exact"
    if reason := _no_kernel(config, device):
        return "sdpa", reason
    return "varlen", "packed sequences: torch's kernel in half precision, else rectangles of similar lengths"


def with_attention(model: ModelConfig, config: PretrainedConfig | None, device: torch.device) -> ModelConfig:
    """Return ``[model]`` with ``auto`` replaced by the implementation that ``choose_attention`` returns."""
    name, _ = choose_attention(model.attention, config, device)
    return model if name == model.attention else model.model_copy(update={"attention": name})


def can_pack(config: Any) -> bool:
    """Return whether a model computes each sequence of a pack as it does the sequence alone, as far as its config says.

    Recurrent state runs across sequences, ``varlen`` has no mask for chunks, and longrope chooses the frequencies of all
    positions by the longest sequence.
    """
    layers = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    return set(layers) <= ATTENTION_LAYERS and "longrope" not in _rope_tables(config)


def check_rope(config: Any) -> None:
    """Refuse frequencies that depend on earlier sequences: the log-probs of a sequence would change.

    Raises:
        ConfigError: the type is ``dynamic``, and no ``alpha`` fixes the frequencies (Hunyuan).
    """
    rope = _rope_tables(config).get("dynamic")
    if rope is not None and not rope.get("alpha"):
        longest = config.get_text_config(decoder=True).max_position_embeddings
        raise ConfigError(
            "This model's rope_type is 'dynamic', whose frequencies depend on the longest sequence so far, so log-probs are not "
            f"reproducible. Up to {longest} tokens it equals 'default': set model.override.rope_type = 'default'."
        )


def _rope_tables(config: Any) -> dict[str, dict[str, Any]]:
    """Return the tables of the rotary embeddings of a config by their types; types of layers may have separate ones."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    tables = [table for table in (rope, *rope.values()) if isinstance(table, dict)]
    return {table["rope_type"]: table for table in tables if "rope_type" in table}


def _no_kernel(config: Any, device: torch.device) -> str:
    """Return why torch's kernel for packed sequences does not run; "" where it does."""
    if torch.cuda.get_device_capability(device) < KERNEL_CAPABILITY:
        return (
            "this device is older than torch's kernel for packed sequences asks for (compute capability 8.0)"
        )
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or 1
    size = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // heads
    if size > KERNEL_HEAD:
        return f"torch's kernel for packed sequences has heads up to {KERNEL_HEAD}, not {size}"
    return ""


def _check_installed(name: str, device: torch.device) -> None:
    package = PACKAGES.get(name)
    if package is None:
        return
    if device.type != "cuda":
        raise ConfigError(
            f"model.attention '{name}' runs on CUDA devices only, and this is {device}. Use 'auto'."
        )
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"model.attention '{name}' needs the package {package}, which is not installed. Install it, or use "
            "'auto', which takes torch's own kernel for packed sequences."
        ) from None
