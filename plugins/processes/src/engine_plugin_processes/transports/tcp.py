"""Weights over a connection to each taker: a copy for each, one after another.

Nothing but sockets is needed, and a taker that is gone hurts no other update. A connection is made for an update and
ends with it; who does not know the run's token is sent away.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from engine_plugin_processes.buckets import unpacked
from engine_plugin_processes.channel import Channel, Closed, callers, connect, listen
from engine_plugin_processes.codec import DecodeError, encode
from engine_plugin_processes.transports.bucketing import Stream, Transport, Update, check, flattened, size_of

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.errors import TrainingFailed


class TCP(Transport):
    """See the module and ``Transport``."""

    listener: socket.socket | None = None
    addresses: Sequence[tuple[str, int]] = ()

    def open(self) -> Any:
        """Where this end listens; the one that sends does not."""
        if self.end.place == 0:
            return None
        self.listener = listen(self.end.host)
        return list(self.listener.getsockname()[:2])

    def join(self, told: Sequence[Any]) -> None:
        self.addresses = [(str(host), int(port)) for host, port in told[1:]]

    def send(self, stream: Stream, update: Update) -> int:
        channels: list[Channel] = []
        sent = 0
        with ThreadPoolExecutor(1) as sender:  # the next bucket is gathered while the last one is sent
            try:
                for place, address in enumerate(self.addresses, 1):
                    channels.append(self._connected(address, place, update))
                under_way: Future[None] | None = None
                for flat in flattened(stream, torch.device("cpu")):
                    if under_way is not None:
                        under_way.result()
                    sent += size_of(flat.bucket)
                    message = encode({**flat.told(update), "data": flat.data})
                    under_way = sender.submit(self._to_all, channels, message, update)
                if under_way is not None:
                    under_way.result()
                self._to_all(channels, encode({"end": True}), update)
                for place, channel in enumerate(channels, 1):
                    self._taken(channel, place, update)
            finally:
                for channel in channels:
                    channel.close()
        return sent

    def receive(self, update: Update) -> Generator[tuple[str, Tensor], None, None]:
        channel = self._accepted(update)
        expected = 0
        try:
            while True:
                try:
                    message: Any = channel.receive()
                except (Closed, DecodeError) as error:
                    raise self._broken(error, update, "the next bucket did not come") from error
                if "end" in message:
                    channel.send({"taken": True})
                    return
                data = self._data(message, update)
                check(self.end, update, message, expected, data)
                self._took(channel, expected, update)
                expected += 1
                yield from unpacked(data, message["entries"])
        finally:
            channel.close()

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()

    def _data(self, message: Any, update: Update) -> Tensor:
        """The bytes of a bucket."""
        data: Tensor = message["data"]
        return data

    def _took(self, channel: Channel, number: int, update: Update) -> None:
        """It is whole, and this end's own; not told here: what has arrived is nobody else's."""

    def _connected(self, address: tuple[str, int], place: int, update: Update) -> Channel:
        try:
            channel = connect(address, self.end.token, 0, self.options.timeout_seconds)
        except (OSError, TimeoutError) as error:
            raise self.end.failed(update, f"{self.end.names[place]} does not answer: {error}") from error
        channel.socket.settimeout(self.options.timeout_seconds)
        return channel

    def _accepted(self, update: Update) -> Channel:
        """The sender; strangers are passed over."""
        assert self.listener is not None
        seconds = self.options.timeout_seconds
        with contextlib.closing(callers(self.listener, self.end.token, time.monotonic() + seconds)) as coming:
            found = next(coming, None)
        if found is None:
            raise self.end.late(update, "none came", seconds)
        _, channel = found
        channel.socket.settimeout(seconds)
        return channel

    def _to_all(self, channels: Sequence[Channel], message: Any, update: Update) -> None:
        for place, channel in enumerate(channels, 1):
            self._to_one(channel, place, message, update)

    def _to_one(self, channel: Channel, place: int, message: Any, update: Update) -> None:
        try:
            channel.send(message)
        except Closed as error:
            what = f"{self.end.names[place]} did not take the next bucket"
            raise self._broken(error, update, what) from error

    def _taken(self, channel: Channel, place: int, update: Update) -> None:
        try:
            channel.receive()
        except Closed as error:
            what = f"{self.end.names[place]} did not say that it has all"
            raise self._broken(error, update, what) from error

    def _broken(self, error: Exception, update: Update, what: str) -> TrainingFailed:
        if isinstance(error.__cause__, TimeoutError):
            return self.end.late(update, what, self.options.timeout_seconds)
        return self.end.failed(update, f"The stream of weights broke off: {error}.")
