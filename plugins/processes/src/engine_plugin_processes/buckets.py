"""The layout of a weight stream in buckets: offset of each tensor in the bytes of a bucket, and their checksum."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine_core.contracts.weight_sync import buckets
from engine_plugin_processes.codec import DTYPES

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 64  # bytes; of a tensor's offset and of a bucket's size
CHUNK_WORDS = 1 << 20
MASK = (1 << 64) - 1


class Arena(Protocol):
    """A growable byte buffer, such as one that sender and receivers share."""

    def reserve(self, size: int) -> None:
        """Make the buffer at least ``size`` bytes long; growing may lose its contents."""

    def view(self, offset: int, size: int) -> Tensor:
        """Return bytes ``offset`` to ``offset + size`` as [SIZE] uint8, without a copy."""


@dataclass(slots=True)
class Bucket:
    """A group of tensors: their offsets in the buffer and the checksum of their bytes."""

    offset: int  #: of its first byte in the buffer
    size: int  #: bytes
    entries: list[tuple[str, str, list[int], int]]  #: name, dtype, shape, offset in the bucket
    sum: str = ""  #: checksum of the bytes; "": not computed yet


def checksum(data: Tensor) -> str:
    """Return two sums over the 8-byte words w_i modulo 2^64, of w_i and of (2i + 1) w_i, as hexadecimal text.

    The sums are computed on the tensor's device. They detect any single damaged word, since the factor is odd, and
    swapped words. They do not protect against deliberate forgery.

    Args:
        data: [N] uint8, N a multiple of 8.
    """
    words, factors = data.view(torch.int64), _factors(data.device)
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for first in range(0, len(words), CHUNK_WORDS):  # a chunk stays in a CPU's cache
        chunk = words[first : first + CHUNK_WORDS]
        total = chunk.sum()
        sums += torch.stack((total, (chunk * factors[: len(chunk)]).sum() + 2 * first * total))
    plain, weighed = sums.tolist()  # the only synchronization with the device
    return f"{plain & MASK:016x}{weighed & MASK:016x}"


@functools.lru_cache(maxsize=4)
def _factors(device: torch.device) -> Tensor:
    return 2 * torch.arange(CHUNK_WORDS, dtype=torch.int64, device=device) + 1


def grouped(stream: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors [D_1, D_2, ...] of a stream into lists of at most ``BUCKET_BYTES``; a larger one is alone."""
    return buckets(stream, BUCKET_BYTES, lambda tensor: _aligned(tensor.numel() * tensor.element_size()))


def planned(tensors: Sequence[tuple[str, Tensor]], offset: int) -> Bucket:
    """Return the layout of these tensors in a bucket that begins at ``offset``; nothing is copied.

    Args:
        tensors: names and tensors [D_1, D_2, ...] of any shape.
        offset: first byte of the bucket in the buffer.

    Raises:
        TypeError: a tensor's type cannot be sent between processes.
    """
    entries, at = [], 0
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise TypeError(f"Weight '{name}' is of {dtype}, which does not cross between processes.")
        entries.append((name, dtype, list(tensor.shape), at))
        at += _aligned(tensor.numel() * tensor.element_size())
    return Bucket(offset, at, entries)


def fill(arena: Arena, bucket: Bucket, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Copy tensors from any device to their offsets in the bucket, and set the bucket's checksum.

    Args:
        arena: buffer that contains the bucket.
        bucket: layout from ``planned``.
        tensors: the same names and tensors [D_1, D_2, ...] as for ``planned``.
    """
    data = arena.view(bucket.offset, bucket.size)
    targets, sources = [], []
    for (_, tensor), (_, dtype, shape, at) in zip(tensors, bucket.entries, strict=True):
        end = at + tensor.numel() * tensor.element_size()
        if (gap := at + _aligned(end - at)) > end:
            data[end:gap] = 0
        targets.append(data[at:end].view(DTYPES[dtype]).view(shape))
        sources.append(tensor.detach())
    torch._foreach_copy_(targets, sources)  # on a GPU, one kernel for many tensors
    bucket.sum = checksum(data)


def unpacked(data: Tensor, entries: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a bucket, as views of its bytes.

    Args:
        data: [SIZE] uint8, bytes of the bucket.
        entries: ``Bucket.entries``: name, dtype, shape [D_1, D_2, ...] and offset of each tensor.
    """
    for name, dtype, shape, at in entries:
        kind = DTYPES[dtype]
        size = kind.itemsize
        for length in shape:
            size *= length
        yield name, data[at : at + size].view(kind).view(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
