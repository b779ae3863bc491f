"""A stream of weights cut into buckets: where each tensor lies in the bytes of a bucket, and the checksum of these bytes."""

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
ALIGNMENT = 64  # of a tensor in its bucket, and of a bucket's size
CHUNK_WORDS = 1 << 20
MASK = (1 << 64) - 1


class Arena(Protocol):
    """Memory that owner and process see."""

    def reserve(self, size: int) -> None:
        """Make it at least ``size`` bytes; what lies in it may be lost where it grows."""

    def view(self, offset: int, size: int) -> Tensor:
        """[size] uint8, of the memory itself."""


@dataclass(slots=True)
class Bucket:
    """Some tensors, where they lie, and the checksum of their bytes."""

    offset: int
    size: int
    entries: list[tuple[str, str, list[int], int]]  # name, dtype, shape, byte in the bucket
    sum: str = ""


def checksum(data: Tensor) -> str:
    """Two sums over the 8-byte words w_i, modulo 2^64: of w_i, and of (2i + 1) w_i; worked out on the tensor's device.

    Any single damaged word is seen, since the factor is odd, and so are words that changed places. It is no
    protection against somebody who forges.

    Args:
        data: [n] uint8, n a multiple of 8.
    """
    words, factors = data.view(torch.int64), _factors(data.device)
    sums = (_by_chunks if data.device.type == "cpu" else _at_once)(words, factors)
    plain, weighed = sums.tolist()  # the device is waited for once, here
    return f"{plain & MASK:016x}{weighed & MASK:016x}"


def _by_chunks(words: Tensor, factors: Tensor) -> Tensor:
    """[2] int64, both sums; what is worked on stays in a CPU's cache."""
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for first in range(0, len(words), CHUNK_WORDS):
        sums += _sums(words[first : first + CHUNK_WORDS][None], factors, first)
    return sums


def _at_once(words: Tensor, factors: Tensor) -> Tensor:
    """As ``_by_chunks``, with few kernels: on a GPU to start one takes longer than a chunk does."""
    whole = len(words) // CHUNK_WORDS * CHUNK_WORDS
    rows = words[:whole].view(whole // CHUNK_WORDS, CHUNK_WORDS)
    return _sums(rows, factors, 0) + _sums(words[whole:][None], factors, whole)


def _sums(rows: Tensor, factors: Tensor, first: int) -> Tensor:
    """[2] int64, both sums of these words.

    Args:
        rows: [n, w] int64, w words each, n = 1 or w = ``CHUNK_WORDS``.
        factors: ``_factors``.
        first: number of the first word.
    """
    totals = rows.sum(1)
    at = torch.arange(first, first + CHUNK_WORDS * len(rows), CHUNK_WORDS, device=rows.device)
    weighed = (rows * factors[: rows.shape[1]]).sum() + 2 * (at * totals).sum()
    return torch.stack((totals.sum(), weighed))


@functools.lru_cache(maxsize=4)
def _factors(device: torch.device) -> Tensor:
    return 2 * torch.arange(CHUNK_WORDS, dtype=torch.int64, device=device) + 1


def grouped(stream: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in groups of about ``BUCKET_BYTES``; a larger one is alone."""
    return buckets(stream, BUCKET_BYTES, lambda tensor: _aligned(tensor.numel() * tensor.element_size()))


def planned(tensors: Sequence[tuple[str, Tensor]], offset: int) -> Bucket:
    """Where these tensors will lie in a bucket that begins at ``offset``.

    Raises:
        TypeError: one has a type that does not cross between processes.
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
    """Copy tensors, wherever they are, to their places, and work the checksum out."""
    data = arena.view(bucket.offset, bucket.size)
    targets, sources = [], []
    for (_, tensor), (_, dtype, shape, at) in zip(tensors, bucket.entries, strict=True):
        end = at + tensor.numel() * tensor.element_size()
        if (gap := at + _aligned(end - at)) > end:
            data[end:gap] = 0
        targets.append(data[at:end].view(DTYPES[dtype]).view(shape))
        sources.append(tensor.detach())
    torch._foreach_copy_(targets, sources)  # on a GPU one kernel for many tensors
    bucket.sum = checksum(data)


def unpacked(data: Tensor, entries: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of its bytes."""
    for name, dtype, shape, at in entries:
        kind = DTYPES[dtype]
        size = kind.itemsize
        for length in shape:
            size *= length
        yield name, data[at : at + size].view(kind).view(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
