"""The contract of a transport, and what all of them share: flattened buckets, each with its number and its checksum.

A *link* joins the first rank of a pool, which sends, with all processes of another, which take. Every update of a
link has a number and a policy version; what is left over from an update that failed is known by the number.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_core.errors import TrainingFailed
from engine_plugin_processes.buckets import Bucket, checksum, fill, grouped, planned

if TYPE_CHECKING:
    from engine_core.specs import Options
    from engine_plugin_processes.buckets import Arena

Stream = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Update:
    """One update of a link."""

    number: int  # of the link, counted from 1
    version: int  # policy version that it brings


@dataclass(frozen=True, slots=True)
class End:
    """One process of a link."""

    name: str  # of the transport, for messages
    place: int  # 0 sends, the others take
    names: tuple[str, ...]  # of all, by place: "actor[0] on HOST"
    device: torch.device
    host: str  # the address on which this process is reached
    token: str  # of the run
    # where the processes of the link meet: ``file`` or ``tcp``, see ``starting.store_at``
    meeting: Mapping[str, Any]
    folder: str  # private to the run, and seen by all its processes; "" where there is none
    label: str  # of the link: no other of the run has it

    @property
    def between(self) -> str:
        """Both sides, as this one sees them."""
        takers = self.names[1:] if self.place == 0 else (self.names[self.place],)
        return f"from {self.names[0]} to {', '.join(takers)}"

    def failed(self, update: Update, what: str) -> TrainingFailed:
        """The error of an update that does not arrive."""
        return TrainingFailed(
            f"Weights {self.between} (rollout.transport = '{self.name}', policy version {update.version}): {what}"
        )

    def late(self, update: Update, what: str, seconds: float) -> TrainingFailed:
        """``failed`` after the time of the transport's table."""
        key = f"rollout.{self.name.rpartition(':')[2]}.timeout_seconds"
        return self.failed(update, f"{what} within {seconds:g} s ({key}).")


class Transport(abc.ABC):
    """One end of a link. Made anew, on every end, when an update has failed or who takes part has changed.

    Args:
        options: the transport's table.
        end: of this process.
    """

    def __init__(self, options: Options, end: End) -> None:
        self.options: Any = options
        self.end = end

    @classmethod
    def check(cls, options: Any, one_machine: bool) -> None:
        """Refuse what cannot be here, by key (``ConfigError``). Asked in the controller before anything is started.

        Args:
            options: the transport's table.
            one_machine: all processes of the run are on this one, and have a private folder (``End.folder``).
        """

    def open(self) -> Any:
        """Get ready to be met; a plain value that all ends are told."""
        return None

    def join(self, told: Sequence[Any]) -> None:
        """Meet the others, all of which are ready. Collective over the link.

        Args:
            told: what ``open`` gave, by place.
        """

    @abc.abstractmethod
    def send(self, stream: Stream, update: Update) -> int:
        """Have every taker receive these weights; on place 0.

        Args:
            stream: of a train engine, run to its end. What it raises is told to the takers, and raised.
            update: as the takers are told.

        Returns:
            Bytes of the weights, counted once whatever the number of takers.

        Raises:
            TrainingFailed: a taker is gone or does not take in time. The link is not used again.
        """

    @abc.abstractmethod
    def receive(self, update: Update) -> Generator[tuple[str, Tensor], None, None]:
        """The weights that ``send`` sends, in its order, each bucket checked; on the others.

        The tensors are the taker's to keep. Closed before its end, it does not hold up the other takers.

        Raises:
            TrainingFailed: a bucket is damaged or of another update, or the rest does not come in time. Tensors before it
                were given: the engine is then of no use until a whole update came.
        """

    def close(self) -> None:
        """Free everything; the link is not used again."""


@contextlib.contextmanager
def begun(stream: Generator[Any, None, None]) -> Iterator[None]:
    """At its end a stream of ``receive`` is closed, and begun first where nobody has: the sender waits for this end.

    So an engine that refuses an update before it looks at it (asleep) holds up neither the sender nor other takers.
    """
    try:
        yield
    finally:
        if inspect.getgeneratorstate(stream) == inspect.GEN_CREATED:
            with contextlib.suppress(TrainingFailed):
                next(stream, None)
        stream.close()


@dataclass(slots=True)
class Flat:
    """A bucket and its bytes."""

    number: int  # in its update, from 0
    bucket: Bucket
    data: Tensor  # [size] uint8

    def told(self, update: Update) -> dict[str, Any]:
        """What a taker must know, as plain values."""
        return {
            "update": update.number, "version": update.version, "bucket": self.number,
            "sum": self.bucket.sum, "size": self.bucket.size, "entries": [list(entry) for entry in self.bucket.entries],
        }  # fmt: skip


class Memory:
    """A buffer of one process, as an ``Arena``."""

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, size: int) -> None:
        if size > len(self._bytes):
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._bytes.device)

    def view(self, offset: int, size: int) -> Tensor:
        return self._bytes[offset : offset + size]

    def told(self) -> dict[str, Any]:
        return {}


def flattened(
    stream: Stream, device: torch.device, buffers: tuple[Arena, Arena] | None = None
) -> Iterator[Flat]:
    """The stream in buckets, each flattened into one of two buffers in turn.

    So a bucket may still be on its way while the next one is gathered and filled; asked for the one after that, the
    caller has waited until it was taken.

    Args:
        stream: of weights.
        device: of the buffers that are made.
        buffers: those to fill; None: two are made.
    """
    buffers = buffers or (Memory(device), Memory(device))
    for number, tensors in enumerate(grouped(stream)):
        buffer, bucket = buffers[number % 2], planned(tensors, 0)
        buffer.reserve(bucket.size)
        fill(buffer, bucket, tensors)
        yield Flat(number, bucket, buffer.view(0, bucket.size))


def size_of(bucket: Bucket) -> int:
    """Bytes of its tensors, without the gaps between them."""
    total = 0
    for _, dtype, shape, _ in bucket.entries:
        total += torch.Size(shape).numel() * getattr(torch, dtype).itemsize
    return total


def check(end: End, update: Update, told: Mapping[str, Any], expected: int, data: Tensor) -> None:
    """Refuse a bucket that is not the next one of this update, or whose bytes are not those that were sent.

    Raises:
        TrainingFailed: with both sides.
    """
    mine = {"update": update.number, "version": update.version, "bucket": expected}
    if found := {name: told.get(name) for name in mine if told.get(name) != mine[name]}:
        raise end.failed(update, f"expected {mine}, but {found} came. This is a bug of the transport.")
    if checksum(data) != told["sum"]:
        raise end.failed(
            update,
            f"bucket {expected} came damaged: its checksum is not the one that was sent. The update is refused, and nothing "
            "is sampled until a whole one came. Look at the memory and the network of both.",
        )


def gpu_of(device: torch.device) -> str:
    """Its identity, the same in every process whatever number it has there; "" of another device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
