"""The default damage of the suite of transports: a bit flipped between the sender's checksum and the receiver's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine_plugin_processes.transports import bucketing

if TYPE_CHECKING:
    from torch import Tensor


@contextlib.contextmanager
def after_the_checksum() -> Iterator[None]:
    """Flip one bit of the second bucket of ``flat_buckets`` after its checksum was computed, within the block."""
    fill, filled = bucketing.fill, 0

    def damaged(arena: Any, bucket: Any, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Fill a bucket with tensors [D_1, D_2, ...], and flip a bit of the second one."""
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
