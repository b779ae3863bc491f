"""Weights over TCP: a separate connection and copy for each receiver, one after another.

Needs nothing but sockets, and a lost receiver affects no other update. A connection lasts for one update; a peer that
does not know the run's token is rejected. `send` returns once every receiver has confirmed the whole update.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from engine_core.contracts.weight_transport import WeightTransport, WeightUpdate
from engine_plugin_processes.channel import Address, Channel, Closed, callers, connect, listen
from engine_plugin_processes.codec import DecodeError, Encoded, encode
from engine_plugin_processes.transports.bucketing import flat_buckets, unpacked, verify

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.errors import TrainingFailed


class TCP(WeightTransport):
    """The transport ``tcp``: a connection to each receiver."""

    listener: socket.socket | None = None  #: of a receiver
    addresses: Sequence[Address] = ()  #: of the receivers, after ``join``

    def open(self) -> Any:
        """Return the address at which this endpoint listens; the sender does not listen."""
        if self.endpoint.index == 0:
            return None
        self.listener = listen(self.endpoint.host)
        return list(self.listener.getsockname()[:2])

    def join(self, peers: Sequence[Any]) -> None:
        """Keep the addresses of the receivers."""
        self.addresses = [(str(host), int(port)) for host, port in peers[1:]]

    def send(self, stream: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> int:
        """Send weights [D_1, D_2, ...] in buckets to each receiver; return their bytes without the copies."""
        sent = 0
        # the next bucket is gathered while the last one is sent
        with ThreadPoolExecutor(1) as sender, self._connected(update) as channels:
            under_way: Future[None] | None = None
            for flat in flat_buckets(stream, torch.device("cpu")):
                if under_way is not None:
                    under_way.result()
                sent += flat.weight_bytes
                messages = [encode({**flat.header(update), "data": flat.data})] * len(channels)
                under_way = sender.submit(self._to_all, channels, messages, update)
            if under_way is not None:
                under_way.result()
            self._end(channels, update)
        return sent

    def receive(self, update: WeightUpdate) -> Generator[tuple[str, Tensor], None, None]:
        """Yield the weights [D_1, D_2, ...] of an update from the sender.

        Raises:
            TrainingFailed: the connection broke off or timed out, or a bucket is not the expected one.
        """
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
                verify(self.endpoint, update, message, expected, data)
                self._took(channel, expected, update)
                expected += 1
                yield from unpacked(data, message["entries"])
        finally:
            channel.close()

    def close(self) -> None:
        """Close the listening socket."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    def _data(self, message: Any, update: WeightUpdate) -> Tensor:
        """Return the bytes of a bucket, [SIZE] uint8."""
        data: Tensor = message["data"]
        return data

    def _took(self, channel: Channel, number: int, update: WeightUpdate) -> None:
        """Confirm a verified bucket. Sends nothing here: each receiver has its own copy of the bytes."""

    @contextlib.contextmanager
    def _connected(self, update: WeightUpdate) -> Iterator[list[Channel]]:
        """Yield a channel to each receiver; close them afterwards."""
        channels: list[Channel] = []
        try:
            for address, name in zip(self.addresses, self.endpoint.names[1:], strict=True):
                try:
                    channels.append(connect(address, self.endpoint.token, 0, self.options.timeout_seconds))
                except Closed as error:
                    raise self.endpoint.failure(update, f"{name} does not answer: {error}") from error
                channels[-1].socket.settimeout(self.options.timeout_seconds)
            yield channels
        finally:
            for channel in channels:
                channel.close()

    def _accepted(self, update: WeightUpdate) -> Channel:
        """Return a channel to the sender; peers without the token are skipped."""
        assert self.listener is not None
        seconds = self.options.timeout_seconds
        with contextlib.closing(
            callers(self.listener, self.endpoint.token, time.monotonic() + seconds)
        ) as coming:
            found = next(coming, None)
        if found is None:
            raise self.endpoint.timeout(update, "none came", seconds)
        _, channel = found
        channel.socket.settimeout(seconds)
        return channel

    def _to_all(self, channels: Sequence[Channel], messages: Sequence[Encoded], update: WeightUpdate) -> None:
        """Send each receiver its message."""
        for channel, message, name in zip(channels, messages, self.endpoint.names[1:], strict=True):
            try:
                channel.send(message)
            except Closed as error:
                raise self._broken(error, update, f"{name} did not take the next bucket") from error

    def _all_have(self, channels: Sequence[Channel], update: WeightUpdate) -> None:
        """Wait until every receiver confirms what it has received."""
        for channel, name in zip(channels, self.endpoint.names[1:], strict=True):
            try:
                channel.receive()
            except Closed as error:
                raise self._broken(error, update, f"{name} did not say that it has all") from error

    def _end(self, channels: Sequence[Channel], update: WeightUpdate) -> None:
        """End a complete update."""
        self._to_all(channels, [encode({"end": True})] * len(channels), update)
        self._all_have(channels, update)

    def _broken(self, error: Exception, update: WeightUpdate, what: str) -> TrainingFailed:
        if isinstance(error.__cause__, TimeoutError):
            return self.endpoint.timeout(update, what, self.options.timeout_seconds)
        return self.endpoint.failure(update, f"The stream of weights broke off: {error}.")
