"""The weights of a sampler's processes, on their owner's side: sent with each update, and again to a new process."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.errors import DataError
from engine_plugin_processes.buckets import Arena, Bucket, Delivery, fill, grouped, planned
from engine_plugin_processes.remote_errors import unpack
from engine_plugin_processes.sampler_process.memory import DeviceMemory, HostMemory
from engine_plugin_processes.sampler_process.process import Lost, SamplerProcess

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Stream = Iterable[tuple[str, "Tensor"]]
Filling = Iterator[tuple[Bucket, "list[tuple[str, Tensor]] | None"]]

log = logging.getLogger("engine")


class Weights:
    """See the module.

    Args:
        host: memory that the process sees.
        device: of a GPU whose memory the process can open; None: weights go through host memory.
        source: streams the present weights anew. Without it every bucket keeps a place of its own in host memory,
            where they go through the device's beside.
        again: a new process may have to be given the present weights; False: nothing is kept for one.
    """

    def __init__(
        self,
        host: HostMemory,
        device: torch.device | None,
        source: Callable[[], Stream] | None,
        again: bool = True,
    ) -> None:
        self.host, self.source = host, source
        self._keeps = source is None and again
        self.device_memory = DeviceMemory(device) if device is not None else None
        self.version: int | None = None  # of the last whole update; None: the weights of the model folder
        self._broken = ""  # why no whole update can be given
        self._kept: list[Bucket] = []  # in host memory, of the last update
        self._half = 0  # bytes of each of the two places that are used in turn

    def update(self, processes: Sequence[SamplerProcess], stream: Stream, version: int) -> list[str | Lost]:
        """Bring processes to new weights.

        Args:
            processes: that see the memory; several only where there is no ``source``.
            stream: of the weights; each is copied once, whatever the number of processes.
            version: of these weights.

        Returns:
            For each the engine's checksum, or that it is gone: ``push`` to a new one gives it these weights.

        Raises:
            Exception: the stream's own, or an engine's refusal: nothing is sampled until a whole update.
        """
        self._broken = f"an update to version {version} did not come to its end"
        kept: list[Bucket] = []
        arena: Arena = self.device_memory or self.host
        in_turn = self.device_memory is not None or not self._keeps
        buckets = self._beside(stream, kept) if in_turn else self._filling(stream, kept)
        found = self._deliver(processes, buckets, version, arena, in_turn)
        if self._keeps:
            for _ in buckets:  # the rest, where all are gone
                pass
        self.version, self._broken, self._kept = version, "", kept
        return found

    def push(self, process: SamplerProcess) -> str:
        """Give a new process the weights of the last whole update.

        Raises:
            Lost: it is gone, too.
        """
        if self.version is None or self._broken:
            return ""
        if self.source is not None:
            arena: Arena = self.device_memory or self.host
            (found,) = self._deliver([process], self._beside(self.source(), []), self.version, arena, True)
        else:
            buckets: Filling = ((bucket, None) for bucket in self._kept)
            (found,) = self._deliver([process], buckets, self.version, self.host, False)
        if isinstance(found, Lost):
            raise found
        return found

    def check_whole(self) -> None:
        """Refuse to sample from a mixture.

        Raises:
            DataError: the last update did not come to its end.
        """
        if self._broken:
            raise DataError(f"The sampler holds weights of two versions ({self._broken}). Update them again.")

    def close(self) -> None:
        if self.device_memory is not None:
            self.device_memory.close()

    def _deliver(
        self,
        processes: Sequence[SamplerProcess],
        buckets: Filling,
        version: int,
        arena: Arena,
        in_turn: bool,
    ) -> list[str | Lost]:
        """A bucket to all, then the next: they take it at one time.

        Args:
            processes: that take.
            buckets: what they take.
            version: of these weights.
            arena: where buckets lie.
            in_turn: each is filled into one of two places of the arena; else it lies in its own already.
        """
        under_way = {at: self._begin(process, version, arena) for at, process in enumerate(processes)}
        found: list[Any] = [None] * len(processes)

        def of_each(do: Callable[[Delivery], Any]) -> None:
            for at, delivery in list(under_way.items()):
                try:
                    found[at] = do(delivery)
                except Lost as lost:
                    found[at] = lost
                    del under_way[at]

        try:
            for bucket, tensors in buckets:
                if in_turn:
                    of_each(functools.partial(self._place, bucket=bucket))
                of_each(functools.partial(Delivery.put, bucket=bucket, tensors=tensors))
                if not under_way:
                    break
            of_each(Delivery.finish)
        except BaseException as error:
            for delivery in under_way.values():
                with contextlib.suppress(Lost):  # the stream's own failure is the one to tell
                    delivery.break_off(f"{type(error).__name__}: {error}")
            raise
        for at in under_way:
            if found[at].get("error"):
                raise unpack(found[at]["error"], 0)
            found[at] = found[at]["value"]
        return found

    def _begin(self, process: SamplerProcess, version: int, arena: Arena) -> Delivery:
        number = process.next_number()
        process.send({"kind": "update", "id": number, "version": version})
        return Delivery(process.send, lambda: process.answer_to(number), number, arena)

    def _filling(self, stream: Stream, kept: list[Bucket]) -> Filling:
        """The stream's buckets, filled, one behind another in host memory."""
        for tensors in grouped(stream):
            yield self._kept_bucket(planned(tensors, 0), tensors, kept), tensors

    def _beside(self, stream: Stream, kept: list[Bucket]) -> Filling:
        """The stream's buckets, which who asks for them fills; where they are kept, a copy of each in host memory.

        It is made while the process takes the bucket.
        """
        for tensors in grouped(stream):
            bucket = planned(tensors, 0)
            yield bucket, tensors
            if self._keeps:
                self._kept_bucket(bucket, tensors, kept)

    def _kept_bucket(self, bucket: Bucket, tensors: list[tuple[str, Tensor]], kept: list[Bucket]) -> Bucket:
        """A copy of it behind those that are kept, from the device's memory where it was filled there."""
        offset = kept[-1].offset + kept[-1].size if kept else 0
        made = Bucket(offset, bucket.size, bucket.entries, bucket.sum)
        kept.append(made)
        self.host.reserve(offset + made.size)
        if made.sum and self.device_memory is not None:
            data = self.device_memory.view(bucket.offset, bucket.size)
            self.host.view(offset, made.size).copy_(data)
        else:
            fill(self.host, made, tensors)
        return made

    def _place(self, delivery: Delivery, bucket: Bucket) -> None:
        """One of two places in turn: the one before the last is free once it is answered."""
        arena = delivery.arena
        if bucket.size > self._half:
            delivery.settle()
            self._half = bucket.size
            arena.reserve(2 * self._half)
        bucket.offset = self._half * (delivery.sent % 2)
