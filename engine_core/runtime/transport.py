"""Weights from the ranks of one pool to those of another, worker to worker: buckets over a channel of their own.

Every rank of the source runs the stream to its end, since it is collective; its first one sends. Left out: a
broadcast through the accelerators' own links, which needs a process group over both pools.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.errors import TrainingFailed
from engine_core.runtime.channel import Channel, Closed, accept, connect
from engine_core.runtime.codec import encode

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 64 * 2**20


def send_weights(
    stream: Iterable[tuple[str, Tensor]],
    addresses: Sequence[tuple[str, int]],
    token: str,
    rank: int,
    seconds: float,
) -> int:
    """Stream weights to some listeners, a bucket at a time; returns the bytes sent to each.

    Args:
        stream: of a train engine, run to its end.
        addresses: of the ranks that take them; none on a rank that only takes part.
        token: of the run.
        rank: of this process.
        seconds: to wait for a listener.
    """
    channels: list[Channel] = []
    sent = 0
    try:
        channels = [connect(address, token, rank, seconds) for address in addresses]
        for bucket in _buckets(stream):
            sent += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
            encoded = encode({"bucket": bucket})
            for channel in channels:
                channel.send(encoded)
        for channel in channels:
            channel.send({"end": True})
            channel.receive()  # taken to the end
    finally:
        for channel in channels:
            channel.close()
    return sent


def received_weights(
    listener: socket.socket, token: str, seconds: float
) -> Generator[tuple[str, Tensor], None, None]:
    """The stream that ``send_weights`` of another process sends here.

    Raises:
        TrainingFailed: it broke off, or did not begin in time.
    """
    deadline = time.monotonic() + seconds
    connected = None
    while connected is None:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connected = accept(listener, token)
        except TimeoutError:
            raise TrainingFailed(f"No weights came within {seconds:.0f} s.") from None
    _, channel = connected
    try:
        while True:
            message: Any = channel.receive()
            if "end" in message:
                channel.send({"taken": True})
                return
            yield from message["bucket"]
    except Closed as error:
        raise TrainingFailed(f"The stream of weights broke off: {error}.") from error
    finally:
        channel.close()


def _buckets(stream: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in stream:
        bucket.append((name, tensor))
        size += tensor.numel() * tensor.element_size()
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
