"""Sequence parallelism: several ranks share the tokens of each micro-batch.

It is DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509). Each rank runs the decoder on its contiguous chunk of the
pack. Attention exchanges tokens for heads: a rank gets all tokens with its share of the heads, and afterwards its own
tokens with all heads. ``slices`` runs the forward pass on a chunk.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from engine_core.errors import ConfigError
from engine_plugin_fsdp.ranks import nearest_fit
from engine_plugin_torch.attention import register, varlen
from engine_plugin_torch.rank_exchange import Exchange

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn


def share_sequences(module: nn.Module, group: dist.ProcessGroup, role: str, tp: int = 1) -> None:
    """Make a model's attention exchange tokens for heads.

    Args:
        module: the model; its attention implementation is changed.
        group: the ranks that share tokens.
        role: the role's name, for messages.
        tp: number of ranks that share the heads already.

    Raises:
        ConfigError: the model or its attention cannot share tokens.
    """
    size, key = group.size(), f"{role}.fsdp.sp"
    if not isinstance(module, PreTrainedModel):
        raise ConfigError(
            f"{key}: only models of transformers are split over tokens, and {type(module).__name__} is none. "
            "Leave it out for this role."
        )
    attention = module.config._attn_implementation
    if attention != "varlen":
        raise ConfigError(f"{key} needs model.attention = 'varlen', got '{attention}'.")
    check_heads(module.config, size, tp, role)
    name = f"varlen_over_{size}"  # the ranks of a process are the same for every model with that size
    register(name, functools.partial(_attention, group))
    module.set_attn_implementation(name)


def check_heads(config: Any, size: int, tp: int, role: str) -> None:
    """Refuse a model whose key-value heads are not divisible by ``size * tp``.

    Raises:
        ConfigError: the heads are not divisible.
    """
    text, key = config.get_text_config(decoder=True), f"{role}.fsdp.sp"
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % (size * tp):
        over = f", of which {role}.fsdp.tp leaves {heads // tp} to each rank" if tp > 1 else ""
        fits = [n for n in range(1, heads + 1) if heads % (n * tp) == 0]
        raise ConfigError(
            f"{key} is {size}, which does not divide the model's {heads} key-value heads{over}. {nearest_fit(size, fits)}"
        )


def _attention(
    group: dist.ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Call ``varlen``; with ``stretch``, exchange this rank's tokens for all tokens with a share of the heads."""
    if not settings.pop("stretch", False):
        return varlen(module, query, key, value, attention_mask, **settings)
    query, key, value = (Exchange.apply(part, group, 1, 2) for part in (query, key, value))
    out, _ = varlen(module, query, key, value, attention_mask, **settings)
    return Exchange.apply(out, group, 1, 2), None
