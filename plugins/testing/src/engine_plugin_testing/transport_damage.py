"""Damage for the kit of transports: what is between the sender's checksum and the receiver's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine_plugin_processes.transports import bucketing

if TYPE_CHECKING:
    from torch import Tensor


@contextlib.contextmanager
def after_the_checksum() -> Iterator[None]:
    """One bit of the second bucket of ``flat_buckets`` is turned once its checksum was worked out."""
    fill, filled = bucketing.fill, 0

    def damaged(arena: Any, bucket: Any, tensors: Sequence[tuple[str, Tensor]]) -> None:
        nonlocal filled
        fill(arena, bucket, tensors)
        filled += 1
        if filled == 2:
            arena.view(bucket.offset, bucket.size)[0] ^= 1

    bucketing.fill = damaged
    try:
        yield
    finally:
        bucketing.fill = fill
