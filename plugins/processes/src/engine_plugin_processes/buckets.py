"""Weights from the owner of a sampler to its process: buckets in memory that both see, each with its checksum.

The owner copies tensors into a bucket and tells where they lie; the process copies the bucket to memory of its own,
checks the copy, answers, and hands the tensors to its engine. A bucket that came wrong, or not at all, is copied and
sent again once, with those after it; then the update fails. At most two are on their way, so that one is filled
while the other is taken.

consumes: a stream of weights; waits for: answers, with two buckets on their way; unblocked by: answers, the loss of the
process; produces: messages ``bucket``, ``end``, ``break``.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine_core.contracts.weight_sync import buckets
from engine_core.errors import TrainingFailed
from engine_plugin_processes.codec import DTYPES

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 64  # of a tensor in its bucket, and of a bucket's size
WINDOW = 2  # buckets on their way
CHUNK_WORDS = 1 << 20
MASK = (1 << 64) - 1

Post = Callable[[Mapping[str, Any]], None]


class Arena(Protocol):
    """Memory that owner and process see."""

    def reserve(self, size: int) -> None:
        """Make it at least ``size`` bytes; what lies in it may be lost where it grows."""

    def view(self, offset: int, size: int) -> Tensor:
        """[size] uint8, of the memory itself."""

    def told(self) -> dict[str, Any]:
        """What the other side must know to see the same."""


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


class Delivery:
    """One update on its way to a process.

    Args:
        post: sends a message to it.
        answer: waits for its next answer: ``{"bucket": number, "ok": bool}``, or the reply to the update, which
            ends it (``value`` or ``error``).
        number: of the command.
        arena: where buckets lie.
    """

    def __init__(
        self, post: Post, answer: Callable[[], Mapping[str, Any]], number: int, arena: Arena
    ) -> None:
        self.post, self.answer, self.number, self.arena = post, answer, number, arena
        self.sent = 0
        self.bytes = 0
        self.reply: Mapping[str, Any] | None = None
        self._waiting: deque[tuple[int, Bucket, Sequence[tuple[str, Tensor]] | None]] = deque()
        self._round = 0  # grows when something is sent again: what was on its way before is not looked at
        self._repeated: set[int] = set()
        self._ended = False

    def settle(self, left: int = 0) -> None:
        """Until at most ``left`` buckets are without an answer, or the update is over."""
        while len(self._waiting) > left and self.reply is None:
            self._take(self.answer())

    def put(self, bucket: Bucket, tensors: Sequence[tuple[str, Tensor]] | None) -> None:
        """Send a bucket, filled from ``tensors`` where that was not done; None: it cannot be filled again."""
        self.settle(WINDOW - 1)
        if self.reply is not None:
            return  # the engine has refused the update: the rest is not for it
        if tensors is not None and not bucket.sum:
            fill(self.arena, bucket, tensors)
        self._waiting.append((self.sent, bucket, tensors))
        self._send(self.sent, bucket)
        self.sent += 1
        self.bytes += bucket.size

    def finish(self) -> Mapping[str, Any]:
        """Say that this was all; the process's reply to the update."""
        self._ended = True
        self._end()
        while self.reply is None:
            self._take(self.answer())
        return self.reply

    def break_off(self, why: str) -> None:
        """The stream has failed: so does the update there; its reply is waited for."""
        if self.reply is None:
            self.post({"kind": "break", "id": self.number, "why": why})
            while self.reply is None:
                self._take(self.answer())

    def _take(self, answer: Mapping[str, Any]) -> None:
        if "bucket" not in answer:
            self.reply = answer
        elif answer["ok"]:
            self._waiting.popleft()
        else:
            self._again(answer["bucket"])

    def _again(self, number: int) -> None:
        if number in self._repeated:
            why = f"bucket {number} of the update came damaged, twice"
            self.break_off(why)
            raise TrainingFailed(
                f"Weights do not reach the sampler's process: {why}. It is refused; nothing is sampled "
                "until a whole update came. Look at the machine's memory."
            )
        self._repeated.add(number)
        self._round += 1
        for waiting, bucket, tensors in list(self._waiting):
            if tensors is not None:
                fill(self.arena, bucket, tensors)
            self._send(waiting, bucket)
        if self._ended:
            self._end()

    def _send(self, number: int, bucket: Bucket) -> None:
        self.post(
            {
                "kind": "bucket", "id": self.number, "round": self._round, "bucket": number, "sum": bucket.sum,
                "offset": bucket.offset, "size": bucket.size, "entries": bucket.entries, "memory": self.arena.told(),
            }
        )  # fmt: skip

    def _end(self) -> None:
        self.post({"kind": "end", "id": self.number, "round": self._round, "count": self.sent})


def received(
    take: Callable[[], Mapping[str, Any]],
    answer: Callable[[int, bool], None],
    number: int,
    seen: Callable[[Mapping[str, Any]], Arena],
) -> Iterator[tuple[str, Tensor]]:
    """The stream of the update ``number``, in the process: every tensor of every bucket, checked.

    Args:
        take: waits for the next message.
        answer: tells a bucket's number and whether it came whole.
        number: of the command; messages of another are left over from an update that failed.
        seen: the arena that ``Arena.told`` tells of.

    Raises:
        TrainingFailed: the stream broke off.
    """
    expected = current = 0
    while True:
        message = take()
        if message.get("id") != number:
            continue
        if message["kind"] == "break":
            raise TrainingFailed(f"The stream of weights broke off: {message['why']}.")
        if message["round"] < current:
            continue
        if message["kind"] == "end" and message["count"] == expected:
            return
        data = None
        if message["kind"] == "bucket" and message["bucket"] == expected:
            data = seen(message["memory"]).view(message["offset"], message["size"]).clone()
        if data is None or checksum(data) != message["sum"]:
            current += 1
            answer(expected, False)
            continue
        answer(expected, True)
        expected += 1
        yield from unpacked(data, message["entries"])


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
