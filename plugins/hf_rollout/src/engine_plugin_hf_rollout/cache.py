"""A key-value cache with preallocated buffers: the keys and values of a new token are written behind the others.

The cache of transformers concatenates all keys again for every token and layer. Under autocast, rotary embeddings
with float32 weights give float32 keys, and attention would cast all of them again for each token. This cache keeps them
in autocast's type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

if TYPE_CHECKING:
    from torch import Tensor

LEAST_ROOM = 64  # tokens; a full buffer grows by this, or by a quarter if that is more


class RoomyLayer(DynamicLayer):
    """A ``DynamicLayer`` whose ``keys`` and ``values`` are the filled part of buffers [batch, heads, room, dim]."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append states ``[B, heads, new, dim]``; return all keys and values ``[B, heads, length, dim]``."""
        key_states, value_states = _as_attended(key_states), _as_attended(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.get_seq_length()
        after = before + key_states.shape[-2]
        if not self._buffers or after > self._buffers[0].shape[-2]:
            room = after + max(LEAST_ROOM, after // 4)
            self._buffers = [
                _grown(key_states, self._filled(0), room),
                _grown(value_states, self._filled(1), room),
            ]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., before:after, :] = states
        self.keys, self.values = (buffer[..., :after, :] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices: [A]`` of the batch."""
        length = self.get_seq_length()
        if length:
            self._buffers = [buffer[indices] for buffer in self._buffers]
            self.keys, self.values = (buffer[..., :length, :] for buffer in self._buffers)

    def _filled(self, index: int) -> Tensor | None:
        held = (self.keys, self.values)[index]
        return None if held is None or not held.numel() else held


def _as_attended(states: Tensor) -> Tensor:
    """Cast keys or values to autocast's type where it is on, as the products of attention do."""
    kind = states.device.type
    return states.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else states


def _grown(like: Tensor, filled: Tensor | None, room: int) -> Tensor:
    """Return a new buffer for states ``like`` these with a copy of ``filled``."""
    made = like.new_empty((*like.shape[:-2], room, like.shape[-1]))
    if filled is not None:
        made[..., : filled.shape[-2], :] = filled
    return made


def make_cache(config: Any) -> DynamicCache:
    """Build the cache of a transformers model; layers of other kinds (sliding, recurrent) are transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def select_rows(cache: DynamicCache, indices: Tensor) -> None:
    """Give the batch of a cache the rows ``indices: [A]``, of which some may come several times or not at all."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            # recurrent states, perhaps with keys and values
            layer.reorder_cache(indices)  # type: ignore[arg-type]
        else:
            layer.batch_select_indices(indices)  # type: ignore[attr-defined]
