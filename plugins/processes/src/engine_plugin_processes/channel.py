"""A stream of messages over one socket, each a header and raw bytes in the format of ``codec``.

Sockets between processes of one machine are inherited pairs, which no other process can open. A listener accepts only
a peer that knows the run's token: each side proves it without sending it (HMAC of both sides' nonces).
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import math
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Generator, Iterator
from typing import Any

from engine_plugin_processes.codec import DecodeError, Encoded, decode, encode
from engine_plugin_processes.json_channel import Closed, JsonChannel

LENGTHS = struct.Struct(">QQ")  # of header and payload
MAX_HEADER_BYTES = 1 << 31
MAX_PAYLOAD_BYTES = 1 << 42
HELLO = struct.Struct(">8sI16s")  # magic, rank, nonce
MAGIC = b"engine-1"
PROOF_BYTES, NONCE_BYTES = 32, 16
HANDSHAKE_SECONDS = 10.0
MAX_PENDING_CONNECTIONS = 256  # handshakes of a listener at a time; one more, and the oldest is rejected
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 10}  # 25 s; see ``peer_watch``


class Channel(JsonChannel):
    """A channel of messages both ways; several threads may call ``send``, one ``receive``."""

    @property
    def peer(self) -> str:
        """The address of the other side."""
        return str(self.socket.getpeername()[0])

    def encode(self, message: Any, prompts: bool = True) -> Encoded:
        """Encode a message without sending it; ``prompts`` as in ``codec.encode``."""
        return encode(message, prompts)

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


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that no other process can reach."""
    return socket.socketpair()


Address = tuple[str, int] | str
"""Of a listener: host and port, or the path of a socket of this machine."""


def listen(place: str) -> socket.socket:
    """Return a socket that listens on a free port of a host, or at a path."""
    if not place.startswith("/"):
        return socket.create_server((place, 0), backlog=1024)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(1024)
    return listener


def connect(address: Address, token: str, rank: int, seconds: float) -> Channel:
    """Connect to a listener that accepts by ``callers``.

    Raises:
        Closed: the listener does not answer, or does not know the token.
        OSError: the connection broke during the handshake.
    """
    where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
    try:
        if isinstance(address, str):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(seconds)
            connection.connect(address)
        else:
            connection = socket.create_connection(address, timeout=seconds)
    except OSError as error:
        raise Closed(f"{where}: {error}") from error
    channel = Channel(connection)
    connection.settimeout(HANDSHAKE_SECONDS)
    mine = os.urandom(NONCE_BYTES)
    connection.sendall(HELLO.pack(MAGIC, rank, mine))
    theirs, proof = bytes(channel._read(NONCE_BYTES)), channel._read(PROOF_BYTES)
    if not hmac.compare_digest(bytes(proof), _proof(token, b"listener", rank, mine, theirs)):
        channel.close()
        raise Closed(f"{where} does not know the run's token")
    connection.sendall(_proof(token, b"caller", rank, mine, theirs))
    _settle(connection)
    return channel


def callers(
    listener: socket.socket, token: str, deadline: float, look_seconds: float = math.inf
) -> Generator[tuple[int, Channel] | None, None, None]:
    """Yield the rank and the channel of each peer that connects and proves that it knows the token.

    Other peers are rejected. They delay no one else, whether they are silent or connect again and again: many
    handshakes run at a time, each for at most ``HANDSHAKE_SECONDS``.

    Args:
        listener: from ``listen``.
        token: the run's token.
        deadline: time of ``time.monotonic``; peers are accepted until then.
        look_seconds: None is yielded at this interval, so that the caller can check whether to continue.
    """
    look = time.monotonic() + look_seconds
    with _Handshakes(listener, token) as hall:
        while (now := time.monotonic()) < deadline:
            if now >= look:
                yield None
                look = time.monotonic() + look_seconds
            yield from hall.known(min(deadline, look))


def new_token() -> str:
    """Return a secret for one run."""
    return secrets.token_hex(32)


class _Handshakes:
    """The pending handshakes of a listener: peers that have not proved yet that they know the token."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener, self._token = listener, token
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[socket.socket, tuple[float, Generator[None, None, int]]] = {}  # the oldest first

    def __enter__(self) -> _Handshakes:
        self._listener.setblocking(False)  # a peer may have gone before it is accepted
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in list(self._waiting):
            self._send_away(connection)
        self._selector.close()

    def known(self, until: float) -> Iterator[tuple[int, Channel]]:
        """Wait once for connections or data, at most until ``until``; yield peers that completed the handshake."""
        oldest = min((end for end, _ in self._waiting.values()), default=math.inf)
        seconds = min(until, oldest) - time.monotonic()
        for key, _ in self._selector.select(max(seconds, 0.0)):
            if key.fileobj is self._listener:
                self._take_in()
            elif (found := self._hear(key.fileobj)) is not None:  # type: ignore[arg-type]
                yield found
        now = time.monotonic()
        for connection in [each for each, (end, _) in self._waiting.items() if end <= now]:
            self._send_away(connection)

    def _take_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # the peer has gone, or its network has a problem
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
            return
        if len(self._waiting) >= MAX_PENDING_CONNECTIONS:
            self._make_room()
        connection.setblocking(False)
        self._waiting[connection] = time.monotonic() + HANDSHAKE_SECONDS, _heard(connection, self._token)
        self._selector.register(connection, selectors.EVENT_READ)

    def _make_room(self) -> None:
        """Reject the oldest pending peer.

        Raises:
            OSError: no peer is pending, so other parts of the process hold all descriptors.
        """
        if not self._waiting:
            raise OSError(
                errno.EMFILE, "too many open files: no other process can be heard. Raise `ulimit -n`"
            )
        self._send_away(next(iter(self._waiting)))

    def _hear(self, connection: socket.socket) -> tuple[int, Channel] | None:
        """Continue a peer's handshake; return its rank and a channel once it has proved that it knows the token."""
        if connection not in self._waiting:  # rejected to make room for another
            return None
        try:
            next(self._waiting[connection][1])
        except OSError:
            self._send_away(connection)
        except StopIteration as end:
            return self._known(connection, end.value)
        return None

    def _known(self, connection: socket.socket, rank: int) -> tuple[int, Channel] | None:
        self._forget(connection)
        channel = Channel(connection)
        try:
            _settle(connection)
        except OSError:  # the peer has gone
            channel.close()
            return None
        return rank, channel

    def _send_away(self, connection: socket.socket) -> None:
        self._forget(connection)
        Channel(connection).close()

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._waiting[connection]


def _heard(connection: socket.socket, token: str) -> Generator[None, None, int]:
    """Run the listener's side of a handshake: yield until more bytes have come, and return the peer's rank.

    Raises:
        OSError: the peer has gone, or does not know the token.
    """
    magic, rank, theirs = HELLO.unpack((yield from _exactly(connection, HELLO.size)))
    mine = os.urandom(NONCE_BYTES)
    connection.sendall(mine + _proof(token, b"listener", rank, theirs, mine))
    proof = yield from _exactly(connection, PROOF_BYTES)
    if magic != MAGIC or not hmac.compare_digest(proof, _proof(token, b"caller", rank, theirs, mine)):
        raise Closed("a stranger")
    return int(rank)


def _exactly(connection: socket.socket, count: int) -> Generator[None, None, bytes]:
    data = bytearray()
    while len(data) < count:
        try:
            got = connection.recv(count - len(data))
        except BlockingIOError:
            yield
            continue
        if not got:
            raise Closed("the connection was closed")
        data += got
    return bytes(data)


def _proof(token: str, side: bytes, rank: int, caller: bytes, listener: bytes) -> bytes:
    text = b"|".join(
        [MAGIC, side, str(rank).encode(), bytes(caller).hex().encode(), bytes(listener).hex().encode()]
    )
    return hmac.new(token.encode(), text, hashlib.sha256).digest()


def _settle(connection: socket.socket) -> None:
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():  # a lost host closes no connection
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
