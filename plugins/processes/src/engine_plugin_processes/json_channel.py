"""A stream of JSON messages over one socket, and a thread that sends. Imports nothing heavy.

``channel.Channel`` has the same methods for messages with tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import struct
import threading
import weakref
from typing import Any, ClassVar

LENGTH = struct.Struct(">Q")
MAX_VECTOR = 512  # buffers of one system call


class Closed(ConnectionError):
    """An error: the other side has ended."""


class JsonChannel:
    """A channel of messages both ways; several threads may call ``send``, one ``receive``.

    Attributes:
        max_bytes: longest message that ``receive`` accepts.
    """

    max_bytes: ClassVar[int] = 1 << 30

    def __init__(self, connection: socket.socket) -> None:
        self.socket = close_in_children(connection)
        self.socket.set_inheritable(False)  # programs started by this process must not keep it open
        self._lock = threading.Lock()

    def encode(self, message: Any) -> Any:
        """Encode a message for ``send``.

        Raises:
            TypeError: the message cannot be encoded.
        """
        return json.dumps(message).encode()

    def send(self, message: Any) -> None:
        """Send a value, or the result of ``encode``.

        Raises:
            Closed: the other side has ended.
            TypeError: the value cannot be encoded; nothing was sent.
        """
        encoded = message if isinstance(message, bytes) else self.encode(message)
        self._send([memoryview(LENGTH.pack(len(encoded))), memoryview(encoded)])

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            Closed: the other side has ended, also in the middle of a message.
            ValueError: the bytes are no message.
        """
        (count,) = LENGTH.unpack(self._read(LENGTH.size))
        if count > self.max_bytes:
            raise ValueError(f"a message of {count} bytes")
        try:
            return json.loads(self._read(count))
        except RecursionError as error:
            raise ValueError("JSON that is nested too deeply") from error

    def close(self) -> None:
        """Close the connection for both sides; a waiting ``receive`` raises ``Closed``."""
        with contextlib.suppress(OSError):  # the other side was faster
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _send(self, buffers: list[memoryview]) -> None:
        try:
            with self._lock:
                self._write(buffers)
        except OSError as error:
            raise Closed(str(error)) from error

    def _write(self, buffers: list[memoryview]) -> None:
        while buffers:
            sent = self.socket.sendmsg(buffers[:MAX_VECTOR])
            done = 0
            while done < len(buffers) and sent >= len(buffers[done]):
                sent -= len(buffers[done])
                done += 1
            buffers = buffers[done:]
            if sent:
                buffers[0] = buffers[0][sent:]

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            try:
                got = self.socket.recv_into(view[at:])
            except OSError as error:
                raise Closed(str(error)) from error
            if not got:
                raise Closed("the connection was closed")
            at += got
        return data


class Outbox:
    """A thread that sends, so that an exception raised by a signal in the caller's thread cuts no message in two.

    consumes: messages; waits for: messages, and room in the socket; unblocked by: ``put``, ``close``, the other side,
    also by its end; produces: bytes.
    """

    def __init__(self, channel: JsonChannel) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Send a message after those before it; its values must not change afterwards.

        Raises:
            TypeError: the message cannot be encoded; nothing is sent.
        """
        self._messages.put(self._channel.encode(message))

    def close(self) -> None:
        """Wait until all messages are sent."""
        self._messages.put(None)
        self._thread.join()

    def _send(self) -> None:
        with contextlib.suppress(Closed):  # the receiving thread handles the end
            while (message := self._messages.get()) is not None:
                self._channel.send(message)


_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(connection: socket.socket) -> socket.socket:
    """Close a socket in each process that is forked from this one, and return it; here it stays open.

    A forked process (of a reward, of a data loader) inherits its parent's descriptors. Otherwise its copies stay open after
    the parent has ended, and a peer that waits for the end of the connection waits on.
    """
    _SOCKETS.add(connection)
    return connection


def _close_inherited() -> None:
    for connection in list(_SOCKETS):
        connection.close()
    _SOCKETS.clear()


os.register_at_fork(after_in_child=_close_inherited)
