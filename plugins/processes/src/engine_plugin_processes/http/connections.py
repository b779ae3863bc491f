"""Connections to one server: to an address that was judged, and never longer than a try may take."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from engine_plugin_processes.http.addresses import Network, check_address, literal, look_up

CHUNK_BYTES = 65536
MOST_ADDRESSES = 4  # of a name, that are tried

_FAULTS = (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError)


class Passing(Exception):
    """A try that failed of what may pass.

    Args:
        reason: for the message of the last try.
        wait: seconds that the server asks for.
    """

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class Connections:
    """One connection for each thread that asks, kept while it lasts. Proxies of the environment are not used.

    Args:
        url: of the server.
        allowed: networks besides the public ones that it may be in.
    """

    def __init__(self, url: str, allowed: Sequence[Network]) -> None:
        parts = urllib3.util.parse_url(url)
        self.host, self.path, self.allowed = parts.host or "", parts.request_uri, allowed
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.named = self.host if parts.port is None else f"{self.host}:{parts.port}"
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.own = threading.local()

    def check(self) -> None:
        """Refuse an address that would be refused, before anything is asked; a name that is not known yet may be later.

        Raises:
            AddressRefused: see ``check_address``.
        """
        with contextlib.suppress(OSError):
            look_up(self.host, self.port, self.allowed)

    def exchange(
        self,
        body: bytes | None,
        headers: Mapping[str, str],
        seconds: float,
        most: int,
        path: str | None = None,
    ) -> tuple[Any, bytes | None]:
        """The response, whatever its status, and its body as it came; None for one of more than ``most`` bytes.

        Args:
            body: to post; None: the address is read (GET).
            headers: to send.
            seconds: for everything, from looking the name up to the last byte.
            most: bytes of the body.
            path: instead of that of ``url``.

        Raises:
            Passing: there is none, or it broke off.
            AddressRefused: the name leads to an address that was not named.
        """
        until = time.monotonic() + seconds
        connection = self._connected(until, seconds)
        whole, ended = False, threading.Event()
        try:
            with _cut_off(connection.sock, max(until - time.monotonic(), 0.0), ended):
                response, answer = self._sent(connection, (body, path or self.path), headers, until, most)
                whole = answer is not None
        except _FAULTS as error:
            if ended.is_set() or _late(error):
                raise Passing(f"no whole answer within {seconds:.3g} s") from None
            raise Passing(f"the connection broke off: {_reason(error)}") from None
        finally:
            if not whole or ended.is_set():
                connection.close()
        if ended.is_set():  # what was cut off may look like an end
            raise Passing(f"no whole answer within {seconds:.3g} s")
        return response, answer

    def _sent(
        self,
        connection: HTTPConnection,
        asked: tuple[bytes | None, str],
        headers: Mapping[str, str],
        until: float,
        most: int,
    ) -> tuple[Any, bytes | None]:
        body, path = asked
        connection.timeout = max(until - time.monotonic(), 0.001)
        connection.request(
            "GET" if body is None else "POST",
            path,
            body=body,
            headers={"Host": self.named, **headers},
            preload_content=False,
            decode_content=False,
        )
        response = connection.getresponse()
        parts, size = [], 0
        while part := response.read1(CHUNK_BYTES, decode_content=False):
            parts.append(part)
            size += len(part)
            if size > most:
                return response, None
        return response, b"".join(parts)

    def _connected(self, until: float, seconds: float) -> HTTPConnection:
        """This thread's connection if it still stands, else a new one."""
        kept: HTTPConnection | None = getattr(self.own, "connection", None)
        if kept is not None:
            with contextlib.suppress(ValueError, OSError):
                if kept.is_connected:
                    return kept
            kept.close()
        last: Exception | None = None
        try:
            addresses = look_up(self.host, self.port, self.allowed)
        except OSError as error:
            raise Passing(f"no connection: {error.strerror or error}") from None
        for address in addresses[:MOST_ADDRESSES]:
            self.own.connection = connection = self._to(address, max(until - time.monotonic(), 0.001))
            try:
                connection.connect()
                return connection
            except _FAULTS as error:
                last = error
                connection.close()
        if last is not None and _late(last):
            raise Passing(f"no connection within {seconds:.3g} s")
        raise Passing(f"no connection: {_reason(last)}")

    def _to(self, address: str, seconds: float) -> HTTPConnection:
        """To the address itself, which no name server is asked for again; the certificate must still be the name's."""
        check_address(self.host, address, self.allowed)
        if self.tls is None:
            return HTTPConnection(address, self.port, timeout=seconds)
        name = str(literal(self.host) or self.host)
        return HTTPSConnection(
            address, self.port, timeout=seconds, ssl_context=self.tls, server_hostname=name
        )


@contextlib.contextmanager
def _cut_off(sock: Any, seconds: float, ended: threading.Event) -> Iterator[None]:
    """End what is done with a socket after so long, and tell ``ended``: its own time-out begins again with each byte."""

    def cut() -> None:
        ended.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # under TLS, whose own shutdown would talk first

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _late(error: Exception) -> bool:
    if isinstance(error, urllib3.exceptions.NewConnectionError):  # a time-out too, for this library
        return False
    return isinstance(error, TimeoutError | urllib3.exceptions.TimeoutError)


def _reason(error: Exception | None) -> str:
    """What went wrong, without the objects that the library's messages begin with."""
    return str(error).rpartition(": ")[2] or type(error).__name__
