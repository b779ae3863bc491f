"""Both ends of a worker's mailbox: ``codec`` messages as arguments and results of an actor's methods.

Messages are what ``engine_plugin_processes.codec`` writes, a header and raw bytes; Ray transfers nothing else. A large
payload is put into the object store once, for any number of ranks, and each node fetches it once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from engine_plugin_processes.channel import Channel, Closed, end_with
from engine_plugin_processes.codec import Encoded, decode, encode

STORED_BYTES = 64 * 1024  # payloads of this size or more go into the object store

Parts = tuple[bytes, Any]  # header; payload as an array of bytes


class Store:
    """A store of payloads in the object store, with one object for a payload that goes to several ranks in a row."""

    def __init__(self) -> None:
        self.objects, self.bytes = 0, 0  # put so far
        self._last: tuple[Encoded, Any] | None = None
        self._lock = threading.Lock()

    def payload(self, message: Encoded) -> Any:
        """Return a message's payload as an array of bytes, or as a reference to one."""
        if message.payload_bytes < STORED_BYTES:
            return _array(message)
        with self._lock:
            if self._last is None or self._last[0] is not message:
                self._last = message, ray.put(_array(message))
                self.objects, self.bytes = self.objects + 1, self.bytes + message.payload_bytes
            return self._last[1]

    def forget(self) -> None:
        """Release the last object."""
        with self._lock:
            self._last = None


class ControllerEnd:
    """The controller's end of a mailbox, with the interface of ``channel.Channel``.

    Args:
        actor: ``actor.Seat``.
        store: the store that all workers of the run share.
        line: an idle connection to the actor; None: the actor does not reach this process.
    """

    def __init__(self, actor: Any, store: Store, line: Channel | None = None) -> None:
        self._actor, self._store, self._line = actor, store, line
        self._missed: TimeoutError | None = None  # the actor's node does not answer
        if line is not None:
            end_with(line, self._miss)
        self._answers = actor.answers.options(num_returns="streaming").remote()
        self._closed = False
        self.loss = ""  # Ray's description of the actor's end
        self.over = threading.Event()  # the actor sends nothing more

    def send(self, message: Any) -> None:
        """Send a value or an ``Encoded`` one; ``receive`` reports an actor that has ended.

        Raises:
            Closed: after ``close``.
            TypeError: the value cannot be encoded.
        """
        encoded = message if isinstance(message, Encoded) else encode(message)
        if self._closed:
            raise Closed("the run has let it go")
        self._actor.deliver.remote(encoded.header, self._store.payload(encoded))

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            Closed: the actor has ended.
        """
        try:
            header, payload = ray.get(next(self._answers))
        except StopIteration:
            self.over.set()
            raise Closed("it closed its mailbox") from None
        except RayError as error:
            self.loss = str(error)
            self.over.set()
            raise Closed(str(error)) from (self._missed or error)
        return decode(header, bytearray(payload))

    def _miss(self, end: Closed) -> None:
        """End ``receive``, which Ray would do about a minute after the node was lost."""
        if not self._closed:
            self._missed = TimeoutError("no answer on an idle connection")
            ray.kill(self._actor, no_restart=True)

    def close(self) -> None:
        """Send no more messages and close the idle connection."""
        self._closed = True
        if self._line is not None:
            self._line.close()


class WorkerEnd:
    """The actor's end of a mailbox, with the interface of ``channel.Channel``."""

    encode = staticmethod(encode)

    def __init__(self) -> None:
        self._in: queue.SimpleQueue[Parts | None] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[Parts | None] = queue.SimpleQueue()

    def deliver(self, header: bytes, payload: Any) -> None:
        """Accept a message of the controller."""
        self._in.put((header, payload))

    def receive(self) -> Any:
        """Return the next message, with writable tensors.

        Raises:
            Closed: the mailbox was closed.
        """
        parts = self._in.get()
        if parts is None:
            raise Closed("the mailbox was closed")
        return decode(parts[0], bytearray(parts[1]))

    def send(self, message: Any) -> None:
        """Send a value to the controller."""
        encoded = message if isinstance(message, Encoded) else encode(message)
        self._out.put((encoded.header, _array(encoded)))

    def answers(self) -> Iterator[Parts]:
        """Yield the messages that were sent, until ``close``."""
        while (parts := self._out.get()) is not None:
            yield parts

    def close(self) -> None:
        """Close both directions."""
        self._in.put(None)
        self._out.put(None)


def _array(message: Encoded) -> Any:
    return np.frombuffer(b"".join(message.buffers), dtype=np.uint8)
