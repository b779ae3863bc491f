"""The bucketing that transports share: a weight stream as flat buckets, each with a number and a checksum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_plugin_processes.buckets import Bucket, checksum, fill, grouped, planned

if TYPE_CHECKING:
    from engine_core.contracts.weight_transport import TransportEndpoint, WeightUpdate
    from engine_plugin_processes.buckets import Arena


@dataclass(slots=True)
class FlatBucket:
    """A bucket: some tensors of an update as one contiguous run of bytes."""

    number: int  #: within the update, from 0
    bucket: Bucket  #: offsets and checksum
    data: Tensor  #: [size] uint8

    def header(self, update: WeightUpdate) -> dict[str, Any]:
        """Return the fields that ``verify`` and the unpacking of the bytes need, as plain values."""
        return {
            "update": update.number, "version": update.version, "bucket": self.number,
            "sum": self.bucket.sum, "size": self.bucket.size, "entries": [list(entry) for entry in self.bucket.entries],
        }  # fmt: skip


class PrivateBuffer:
    """An ``Arena`` in memory that only this process sees."""

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, size: int) -> None:
        """Make the buffer at least ``size`` bytes long; its contents may be lost."""
        if size > len(self._bytes):
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._bytes.device)

    def view(self, offset: int, size: int) -> Tensor:
        """Return bytes ``offset`` to ``offset + size`` of the buffer, [SIZE] uint8."""
        return self._bytes[offset : offset + size]


def flat_buckets(
    stream: Iterable[tuple[str, Tensor]], device: torch.device, buffers: tuple[Arena, Arena] | None = None
) -> Iterator[FlatBucket]:
    """Cut a stream into buckets and copy each into one of two buffers in turn.

    The sender can transfer a bucket while the next one is gathered and copied. It must have finished with a bucket
    before it requests the one after the next.

    Args:
        stream: names and tensors [D_1, D_2, ...] of any shape, on any device.
        device: device of the buffers to allocate.
        buffers: used instead of allocating two.
    """
    buffers = buffers or (PrivateBuffer(device), PrivateBuffer(device))
    for number, tensors in enumerate(grouped(stream)):
        buffer, bucket = buffers[number % 2], planned(tensors, 0)
        buffer.reserve(bucket.size)
        fill(buffer, bucket, tensors)
        yield FlatBucket(number, bucket, buffer.view(0, bucket.size))


def weight_bytes(bucket: Bucket) -> int:
    """Return the number of bytes of a bucket's tensors, without the gaps between them."""
    total = 0
    for _, dtype, shape, _ in bucket.entries:
        total += torch.Size(shape).numel() * getattr(torch, dtype).itemsize
    return total


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
