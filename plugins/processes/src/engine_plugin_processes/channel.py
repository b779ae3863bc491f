"""A stream of messages over one socket, each a header and raw bytes in the format of ``codec``.

Sockets between processes of one machine are inherited pairs, which no other process can open. A listener accepts only
a peer that knows the run's token: each side proves it without sending it (HMAC of both sides' nonces).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from engine_plugin_processes.codec import DecodeError, Encoded, decode, encode
from engine_plugin_processes.json_channel import Closed, JsonChannel

LENGTHS = struct.Struct(">QQ")  # of header and payload
MAX_HEADER_BYTES = 1 << 31
MAX_PAYLOAD_BYTES = 1 << 42
HELLO = struct.Struct(">8sI16s")  # magic, rank, nonce
MAGIC = b"engine-1"
PROOF_BYTES, NONCE_BYTES = 32, 16
HANDSHAKE_SECONDS = 5.0  # of a listener, for each step of a peer
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 10}
"""Probes of an idle connection: a host that was lost without notice ends it after 25 seconds."""


class Channel(JsonChannel):
    """A channel of messages both ways; several threads may call ``send``, one ``receive``."""

    @property
    def peer(self) -> str:
        """The address of the other side."""
        return str(self.socket.getpeername()[0])

    def encode(self, message: Any) -> Encoded:
        """Encode a message without sending it."""
        return encode(message)

    def send(self, message: Any) -> None:
        """Send a value or an ``Encoded`` one.

        Raises:
            Closed: the other side has ended.
            TypeError: the value cannot be encoded; nothing was sent.
        """
        encoded = message if isinstance(message, Encoded) else encode(message)
        start = LENGTHS.pack(len(encoded.header), encoded.payload_bytes)
        self._send([memoryview(start + encoded.header), *encoded.buffers])

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            Closed: the other side has ended, also in the middle of a message.
            DecodeError: the bytes are no message.
        """
        header_bytes, payload_bytes = LENGTHS.unpack(self._read(LENGTHS.size))
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise DecodeError(f"A message of {header_bytes} and {payload_bytes} bytes is none of ours.")
        header = self._read(header_bytes)
        return decode(bytes(header), self._read(payload_bytes))


Address = tuple[str, int]
"""Of a listener: host and port."""


def listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port of a host."""
    return socket.create_server((host, 0), backlog=1024)


def connect(address: Address, token: str, rank: int, seconds: float) -> Channel:
    """Connect to a listener that accepts by ``callers``.

    Raises:
        Closed: the listener does not answer, or does not know the token.
    """
    where = f"{address[0]}:{address[1]}"
    try:
        connection = socket.create_connection(address, timeout=seconds)
    except OSError as error:
        raise Closed(f"{where}: {error}") from error
    channel, mine = Channel(connection), os.urandom(NONCE_BYTES)
    try:
        channel._send([memoryview(HELLO.pack(MAGIC, rank, mine))])
        theirs, proof = bytes(channel._read(NONCE_BYTES)), channel._read(PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(token, b"listener", rank, mine, theirs)):
            raise Closed(f"{where} does not know the run's token")
        channel._send([memoryview(_proof(token, b"caller", rank, mine, theirs))])
    except Closed:
        channel.close()
        raise
    _settle(connection)
    return channel


def callers(
    listener: socket.socket, token: str, deadline: float, look_seconds: float = math.inf
) -> Generator[tuple[int, Channel] | None, None, None]:
    """Yield the rank and the channel of each peer that connects and proves that it knows the token.

    Other peers are rejected, one after another: a silent one after ``HANDSHAKE_SECONDS``.

    Args:
        listener: from ``listen``.
        token: the run's token.
        deadline: time of ``time.monotonic``; peers are accepted until then.
        look_seconds: None is yielded at this interval, so that the caller can check whether to continue.
    """
    look = time.monotonic() + look_seconds
    while (now := time.monotonic()) < deadline:
        if now >= look:
            yield None
            look = time.monotonic() + look_seconds
        listener.settimeout(max(min(deadline, look) - time.monotonic(), 0.001))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        channel = Channel(connection)
        try:
            found = _known(channel, token)
        except OSError:  # ``Closed``, too: the peer has gone, or is a stranger
            channel.close()
        else:
            yield found, channel


def _known(channel: Channel, token: str) -> int:
    """Run the listener's side of a handshake; return the peer's rank.

    Raises:
        OSError: the peer has gone, or does not know the token.
    """
    channel.socket.settimeout(HANDSHAKE_SECONDS)
    magic, rank, theirs = HELLO.unpack(channel._read(HELLO.size))
    mine = os.urandom(NONCE_BYTES)
    channel._send([memoryview(mine + _proof(token, b"listener", rank, theirs, mine))])
    proof = channel._read(PROOF_BYTES)
    if magic != MAGIC or not hmac.compare_digest(proof, _proof(token, b"caller", rank, theirs, mine)):
        raise Closed("a stranger")
    _settle(channel.socket)
    return int(rank)


def end_with(line: Channel, end: Callable[[Closed], object]) -> None:
    """Call ``end`` in a thread once the other side of an idle connection has gone, or its host.

    A connection with bytes in flight is not probed: the system sends them again for a quarter of an hour.

    consumes: nothing, the connection is idle; waits for: the end of the connection; unblocked by: that; produces: the
    call.
    """

    def wait() -> None:
        """Wait for the end of the connection, then call ``end``."""
        try:
            line.receive()
        except Closed as error:
            end(error)

    threading.Thread(target=wait, name="line", daemon=True).start()


def new_token() -> str:
    """Return a secret for one run."""
    return secrets.token_hex(32)


def _proof(token: str, side: bytes, rank: int, caller: bytes, listener: bytes) -> bytes:
    text = b"|".join([MAGIC, side, str(rank).encode(), caller.hex().encode(), listener.hex().encode()])
    return hmac.new(token.encode(), text, hashlib.sha256).digest()


def _settle(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
