"""The default damage of the suite of transports: bytes changed between the sender's checksum and the receiver's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine_plugin_processes.transports import bucketing

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.contracts.weight_transport import WeightUpdate

WAYS = (
    "a bit flipped",
    "two words swapped",
    "two tensors' first bytes swapped",
    "the last byte of the last bucket",
    "a sign turned",
    "two words swapped that are 16 MiB apart",
)
MISPLACED = ("a bucket of another update", "a bucket with the number of the one before")
"""Ways in which the bytes of the second bucket are right."""
FAR = WAYS[5]  # of a tensor of twice that distance
LAST = "a.head.weight"  # of the kit's weights; alone in the last bucket
WORD, GAP = 8, 64  # bytes of a word of checksums; distance of two tensors in a bucket
FAR_BYTES = 16 * 2**20


class _OfAnother(bucketing.FlatBucket):
    """A bucket that says that it belongs to the next update."""

    def header(self, update: WeightUpdate) -> dict[str, Any]:
        """Return the fields of another update of this version."""
        return {**super().header(update), "update": update.number + 1}


class _Twice(bucketing.FlatBucket):
    """A bucket that says that it is the one before."""

    def header(self, update: WeightUpdate) -> dict[str, Any]:
        """Return the fields with the number of the bucket before."""
        return {**super().header(update), "bucket": self.number - 1}


@contextlib.contextmanager
def after_the_checksum(way: str = WAYS[0]) -> Iterator[None]:
    """Damage the second bucket of ``flat_buckets``, or the last, in one of ``WAYS`` or ``MISPLACED`` after its checksum, within the block."""
    filled = bucketing.filled

    def damaged(
        number: int, tensors: Sequence[tuple[str, Tensor]], buffer: bucketing.Buffer
    ) -> bucketing.FlatBucket:
        """Fill a bucket with tensors [D_1, D_2, ...], and damage it if it is the one to damage."""
        bucket = filled(number, tensors, buffer)
        data = bucket.data
        if way in MISPLACED:
            if number == 1:
                made = _OfAnother if way == MISPLACED[0] else _Twice
                return made(*(getattr(bucket, one.name) for one in dataclasses.fields(bucket)))
        elif way == WAYS[3]:
            if tensors[-1][0] == LAST:
                data[tensors[-1][1].numel() * tensors[-1][1].element_size() - 1] ^= 1
        elif way == FAR:
            if len(data) > FAR_BYTES:
                first, second = data[:WORD].clone(), data[FAR_BYTES : FAR_BYTES + WORD].clone()
                data[:WORD], data[FAR_BYTES : FAR_BYTES + WORD] = second, first
        elif number == 1 and way == WAYS[0]:
            data[0] ^= 1
        elif number == 1 and way == WAYS[4]:
            data[WORD - 1] ^= 0x80
        elif number == 1:
            size = WORD if way == WAYS[1] else GAP
            data[: 2 * size] = data[: 2 * size].view(2, size).flip(0).flatten()
        return bucket

    bucketing.filled = damaged
    try:
        yield
    finally:
        bucketing.filled = filled
