"""The weights of a sampler's process, on its owner's side: sent with each update, and again to a new process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from engine_core.errors import DataError
from engine_core.runtime.remote_errors import unpack
from engine_core.runtime.sampler.buckets import Arena, Bucket, Delivery, fill, grouped, planned
from engine_core.runtime.sampler.memory import DeviceMemory, HostMemory
from engine_core.runtime.sampler.process import Lost, SamplerProcess

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Stream = Iterable[tuple[str, "Tensor"]]

log = logging.getLogger("engine")


class Weights:
    """See the module.

    Args:
        host: memory that the process sees.
        device: of a GPU whose memory the process can open; None: weights go through host memory.
        source: streams the present weights anew. Without it every bucket keeps a place of its own in host memory.
    """

    def __init__(
        self, host: HostMemory, device: torch.device | None, source: Callable[[], Stream] | None
    ) -> None:
        self.host, self.source = host, source
        self.device_memory = DeviceMemory(device) if device is not None else None
        self.version: int | None = None  # of the last whole update; None: the weights of the model folder
        self._broken = ""  # why no whole update can be given
        self._kept: list[Bucket] = []  # in host memory, of the last update
        self._half = 0  # bytes of each of the two places that are used in turn

    def update(self, process: SamplerProcess, stream: Stream, version: int) -> str:
        """Bring a process to new weights; the engine's checksum.

        Raises:
            Lost: the process is gone. ``push`` to a new one gives it these weights.
            Exception: the stream's own, or the engine's refusal: the process samples no more until a whole update.
        """
        self._broken = f"an update to version {version} did not come to its end"
        kept: list[Bucket] = []
        buckets = self._filling(stream, kept)
        try:
            found = self._deliver(process, buckets, version)
        except Lost:
            if self.source is None:
                for _ in buckets:  # the rest, which a new process is given
                    pass
            self._commit(version, kept)
            raise
        self._commit(version, kept)
        return found

    def push(self, process: SamplerProcess) -> str:
        """Give a new process the weights of the last whole update.

        Raises:
            Lost: it is gone, too.
        """
        if self.version is None or self._broken:
            return ""
        if self.source is not None:
            return self._deliver(process, self._filling(self.source(), []), self.version)
        return self._deliver(process, ((bucket, None) for bucket in self._kept), self.version)

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

    def _commit(self, version: int, kept: list[Bucket]) -> None:
        self.version, self._broken, self._kept = version, "", kept

    def _deliver(
        self,
        process: SamplerProcess,
        buckets: Iterable[tuple[Bucket, list[tuple[str, Tensor]] | None]],
        version: int,
    ) -> str:
        number = process.next_number()
        process.post({"kind": "update", "id": number, "version": version})
        arena: Arena = self.device_memory if self.device_memory and self.source else self.host
        delivery = Delivery(process.post, lambda: process.answer_to(number), number, arena)
        try:
            for bucket, tensors in buckets:
                if self.source is not None:
                    self._place(delivery, bucket)
                delivery.put(bucket, tensors)
            reply = delivery.finish()
        except Lost:
            raise
        except BaseException as error:
            with contextlib.suppress(Lost):  # the stream's own failure is the one to tell
                delivery.break_off(f"{type(error).__name__}: {error}")
            raise
        if reply.get("error"):
            raise unpack(reply["error"], 0)
        found: str = reply["value"]
        return found

    def _filling(
        self, stream: Stream, kept: list[Bucket]
    ) -> Iterator[tuple[Bucket, list[tuple[str, Tensor]]]]:
        """The stream's buckets; where they are kept, filled, one behind another in host memory."""
        for tensors in grouped(stream):
            offset = kept[-1].offset + kept[-1].size if kept else 0
            bucket = planned(tensors, offset)
            if self.source is None:
                kept.append(bucket)
                self.host.reserve(bucket.offset + bucket.size)
                fill(self.host, bucket, tensors)
            yield bucket, tensors

    def _place(self, delivery: Delivery, bucket: Bucket) -> None:
        """One of two places in turn: the one before the last is free once it is answered."""
        arena = delivery.arena
        if bucket.size > self._half:
            delivery.settle()
            self._half = bucket.size
            arena.reserve(2 * self._half)
        bucket.offset = self._half * (delivery.sent % 2)
