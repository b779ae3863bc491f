"""The bucketing that transports share: a weight stream as numbered flat buckets, each with a checksum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_core.contracts.weight_sync import buckets
from engine_plugin_processes.codec import DTYPES, NAMES

if TYPE_CHECKING:
    from engine_core.contracts.weight_transport import TransportEndpoint, WeightUpdate

BUCKET_BYTES = 64 * 2**20
ON_GPU = 4  # factor for buckets on a GPU, where each costs a wait and, between processes, a switch of the GPU
ALIGNMENT = 64  # bytes; of a tensor's offset and of a bucket's size
ROW_WORDS = 1024
MASK = (1 << 64) - 1


@dataclass(slots=True)
class FlatBucket:
    """A bucket: some tensors of an update as one contiguous run of bytes."""

    number: int  #: within the update, from 0
    entries: list[tuple[str, str, list[int], int]]  #: name, dtype, shape, offset of each tensor
    data: Tensor  #: [SIZE] uint8
    weight_bytes: int  #: bytes of the tensors, without the gaps between them
    sum: str  #: checksum of ``data``

    def header(self, update: WeightUpdate) -> dict[str, Any]:
        """Return the fields that ``verify`` and the unpacking of the bytes need, as plain values."""
        return {
            "update": update.number, "version": update.version, "bucket": self.number,
            "sum": self.sum, "size": len(self.data), "entries": [list(entry) for entry in self.entries],
        }  # fmt: skip


class Buffer:
    """Memory of a device that one bucket after another uses."""

    def __init__(self, device: torch.device) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, size: int) -> Tensor:
        """Return the first ``size`` bytes of the buffer, [SIZE] uint8; a buffer that grows loses its contents."""
        if size > len(self.bytes):
            self.bytes = torch.zeros(size, dtype=torch.uint8, device=self.bytes.device)
        return self.bytes[:size]


def flat_buckets(
    stream: Iterable[tuple[str, Tensor]], device: torch.device, buffers: Sequence[Buffer] = ()
) -> Iterator[FlatBucket]:
    """Cut a stream into buckets and copy each into one of two buffers in turn.

    The sender can transfer a bucket while the next one is gathered and copied. It must have finished with a bucket
    before it requests the one after the next.

    Args:
        stream: names and tensors [D_1, D_2, ...] of any shape, on any device.
        device: device of the buffers to allocate.
        buffers: two buffers to use instead of allocating them.
    """
    buffers = buffers or (Buffer(device), Buffer(device))
    limit = BUCKET_BYTES * (1 if device.type == "cpu" else ON_GPU)
    for number, tensors in enumerate(buckets(stream, limit)):
        yield filled(number, tensors, buffers[number % 2])


def filled(number: int, tensors: Sequence[tuple[str, Tensor]], buffer: Buffer) -> FlatBucket:
    """Copy tensors from any device into a buffer; return them as a bucket with its checksum.

    Args:
        number: number of the bucket.
        tensors: names and tensors [D_1, D_2, ...] of any shape.
        buffer: buffer that gets their bytes.

    Raises:
        TypeError: a tensor's type cannot be sent between processes.
    """
    entries, size = [], 0
    for name, tensor in tensors:
        if tensor.dtype not in NAMES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise TypeError(f"Weight '{name}' is of {kind}, which does not cross between processes.")
        entries.append((name, NAMES[tensor.dtype], list(tensor.shape), size))
        size += _aligned(tensor.nbytes)
    data, targets = buffer.take(size), []
    for (_, tensor), (*_, at) in zip(tensors, entries, strict=True):
        end = at + tensor.nbytes
        data[end : at + _aligned(tensor.nbytes)] = 0
        targets.append(data[at:end].view(tensor.dtype).view(tensor.shape))
    # on a GPU, one kernel for many tensors
    torch._foreach_copy_(targets, [tensor.detach() for _, tensor in tensors])
    return FlatBucket(number, entries, data, sum(tensor.nbytes for _, tensor in tensors), checksum(data))


def unpacked(data: Tensor, entries: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a bucket, as views of its bytes.

    Args:
        data: [SIZE] uint8, bytes of the bucket.
        entries: ``FlatBucket.entries``: name, dtype, shape [D_1, D_2, ...] and offset of each tensor.
    """
    for name, dtype, shape, at in entries:
        kind = DTYPES[dtype]
        yield name, data[at : at + kind.itemsize * math.prod(shape)].view(kind).view(shape)


def checksum(data: Tensor) -> str:
    """Return two sums over the 8-byte words w_i modulo 2^64, of w_i and of (2i + 1) w_i, as hexadecimal text.

    The sums are computed on the tensor's device. They detect any single damaged word, since the factor is odd, and
    swapped words. They do not protect against deliberate forgery.

    Args:
        data: [N] uint8, N a multiple of 8.
    """
    words = data.view(torch.int64)
    count = len(words) // ROW_WORDS
    rows, rest = words[: count * ROW_WORDS].view(count, ROW_WORDS), words[count * ROW_WORDS :]
    by_row, by_column = rows.sum(1), rows.sum(0)
    at = torch.arange(max(count, ROW_WORDS), device=data.device)
    plain = by_column.sum() + rest.sum()
    # the sum of i * w_i, where i is ROW_WORDS * row + column
    placed = ROW_WORDS * (at[:count] * by_row).sum() + (at[:ROW_WORDS] * by_column).sum()
    placed += ((rows.numel() + at[: len(rest)]) * rest).sum()
    found = torch.stack((plain, 2 * placed + plain)).tolist()  # the only synchronization with the device
    return "".join(f"{value & MASK:016x}" for value in found)


def verify(
    endpoint: TransportEndpoint, update: WeightUpdate, header: Mapping[str, Any], expected: int, data: Tensor
) -> None:
    """Raise for a bucket that is not the next one of this update, or whose bytes differ from those that were sent.

    Args:
        endpoint: endpoint of the receiver.
        update: update that the receiver expects.
        header: ``FlatBucket.header`` of the sender.
        expected: expected number of the bucket.
        data: [SIZE] uint8, as received.

    Raises:
        TrainingFailed: the message names both sides.
    """
    mine = {"update": update.number, "version": update.version, "bucket": expected}
    if found := {name: header.get(name) for name in mine if header.get(name) != mine[name]}:
        raise endpoint.failure(update, f"expected {mine}, but {found} came. This is a bug of the transport.")
    if checksum(data) != header["sum"]:
        raise endpoint.failure(
            update,
            f"bucket {expected} came damaged: its checksum is not the one that was sent. The update is refused, and nothing "
            "is sampled until a whole one came. Look at the memory and the network of both.",
        )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
