"""Weights over TCP: a separate connection and copy for each receiver, one after another.

Needs nothing but sockets, and a lost receiver affects no other update. A connection lasts for one update; a peer that
does not know the run's token is rejected.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine_core.contracts.weight_transport import WeightTransport, WeightUpdate
from engine_plugin_processes.buckets import unpacked
from engine_plugin_processes.channel import Address, Channel, Closed, callers, connect, listen
from engine_plugin_processes.codec import DecodeError, encode
from engine_plugin_processes.transports.bucketing import flat_buckets, verify, weight_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.errors import TrainingFailed


class TCP(WeightTransport):
    """The transport ``tcp``: a connection to each receiver."""

    listener: socket.socket | None = None
    addresses: Sequence[Address] = ()

    def open(self) -> Any:
        """Return the address at which this endpoint listens; the sender does not listen."""
        if self.endpoint.index == 0:
            return None
        self.listener = listen(self._place())
        name = self.listener.getsockname()
        return name if isinstance(name, str) else list(name[:2])

    def join(self, peers: Sequence[Any]) -> None:
        """Keep the addresses of the receivers."""
        self.addresses = [
            each if isinstance(each, str) else (str(each[0]), int(each[1])) for each in peers[1:]
        ]

    def _place(self) -> str:
        """Return where this endpoint listens, as ``listen`` takes it."""
        return self.endpoint.host

    def send(self, stream: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> int:
        """Send weights [D_1, D_2, ...] in buckets to each receiver; return their bytes without the copies."""
        channels: list[Channel] = []
        sent = 0
        with ThreadPoolExecutor(1) as sender:  # the next bucket is gathered while the last one is sent
            try:
                for index, address in enumerate(self.addresses, 1):
                    channels.append(self._connected(address, index, update))
                under_way: Future[None] | None = None
                for flat in flat_buckets(stream, torch.device("cpu")):
                    if under_way is not None:
                        under_way.result()
                    sent += weight_bytes(flat.bucket)
                    message = encode({**flat.header(update), "data": flat.data})
                    under_way = sender.submit(self._to_all, channels, message, update)
                if under_way is not None:
                    under_way.result()
                self._to_all(channels, encode({"end": True}), update)
                for index, channel in enumerate(channels, 1):
                    self._taken(channel, index, update)
            finally:
                for channel in channels:
                    channel.close()
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
        """Close the listening socket and remove its path."""
        if self.listener is not None:
            if isinstance(path := self.listener.getsockname(), str):
                Path(path).unlink(missing_ok=True)
            self.listener.close()
            self.listener = None

    def _data(self, message: Any, update: WeightUpdate) -> Tensor:
        """Return the bytes of a bucket, [SIZE] uint8."""
        data: Tensor = message["data"]
        return data

    def _took(self, channel: Channel, number: int, update: WeightUpdate) -> None:
        """Confirm a verified bucket. Sends nothing here: each receiver has its own copy of the bytes."""

    def _connected(self, address: Address, index: int, update: WeightUpdate) -> Channel:
        try:
            channel = connect(address, self.endpoint.token, 0, self.options.timeout_seconds)
        except (OSError, TimeoutError) as error:
            raise self.endpoint.failure(
                update, f"{self.endpoint.names[index]} does not answer: {error}"
            ) from error
        channel.socket.settimeout(self.options.timeout_seconds)
        return channel

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

    def _to_all(self, channels: Sequence[Channel], message: Any, update: WeightUpdate) -> None:
        for index, channel in enumerate(channels, 1):
            self._to_one(channel, index, message, update)

    def _to_one(self, channel: Channel, index: int, message: Any, update: WeightUpdate) -> None:
        try:
            channel.send(message)
        except Closed as error:
            what = f"{self.endpoint.names[index]} did not take the next bucket"
            raise self._broken(error, update, what) from error

    def _taken(self, channel: Channel, index: int, update: WeightUpdate) -> None:
        try:
            channel.receive()
        except Closed as error:
            what = f"{self.endpoint.names[index]} did not say that it has all"
            raise self._broken(error, update, what) from error

    def _broken(self, error: Exception, update: WeightUpdate, what: str) -> TrainingFailed:
        if isinstance(error.__cause__, TimeoutError):
            return self.endpoint.timeout(update, what, self.options.timeout_seconds)
        return self.endpoint.failure(update, f"The stream of weights broke off: {error}.")
