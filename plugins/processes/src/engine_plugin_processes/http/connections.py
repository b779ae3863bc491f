"""Connections to one server, never used for longer than an attempt may take."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

CHUNK_BYTES = 65536

_FAULTS = (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError)


class Passing(Exception):
    """An error: an attempt failed, and another one may succeed.

    Args:
        reason: for the message of the last attempt.
        wait: seconds that the server asks for.
    """

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class Connections:
    """A connection for each thread, kept open between requests. Proxies of the environment are not used.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        parts = urllib3.util.parse_url(url)
        self.host, self.path = parts.host or "", parts.request_uri
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.own = threading.local()

    def exchange(
        self,
        body: bytes | None,
        headers: Mapping[str, str],
        seconds: float,
        most: int,
        path: str | None = None,
    ) -> tuple[Any, bytes | None]:
        """Return the response, whatever its status, and its raw body; None for a body of more than ``most`` bytes.

        Args:
            body: to post; None: a GET request.
            headers: to send.
            seconds: for everything, from the connection to the last byte.
            most: bytes of the body.
            path: instead of the path of ``url``.

        Raises:
            Passing: no response came in time, or the connection broke.
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
        if ended.is_set():  # a response that was cut off may look complete
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
            headers=headers,
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
        """Return this thread's connection if it is still open, else a new one.

        Raises:
            Passing: no connection in time.
        """
        kept: HTTPConnection | None = getattr(self.own, "connection", None)
        if kept is not None:
            with contextlib.suppress(ValueError, OSError):
                if kept.is_connected:
                    return kept
            kept.close()
        left = max(until - time.monotonic(), 0.001)
        if self.tls is None:
            connection = HTTPConnection(self.host, self.port, timeout=left)
        else:
            connection = HTTPSConnection(self.host, self.port, timeout=left, ssl_context=self.tls)
        self.own.connection = connection
        try:
            # urllib3 tries each address of the name for this long
            found = socket.getaddrinfo(connection.host, self.port, type=socket.SOCK_STREAM)
            connection.timeout = max(until - time.monotonic(), 0.001) / len(found)
            connection.connect()
        except _FAULTS as error:
            connection.close()
            if _late(error):
                raise Passing(f"no connection within {seconds:.3g} s") from None
            raise Passing(f"no connection: {_reason(error)}") from None
        return connection


@contextlib.contextmanager
def _cut_off(sock: Any, seconds: float, ended: threading.Event) -> Iterator[None]:
    """Shut a socket down after ``seconds`` and set ``ended``: the socket's own timeout restarts with each byte."""

    def cut() -> None:
        """Set ``ended`` and shut the socket down."""
        ended.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # below TLS, whose shutdown would send bytes first

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _late(error: Exception) -> bool:
    if isinstance(error, urllib3.exceptions.NewConnectionError):  # a subclass of urllib3's timeout errors
        return False
    return isinstance(error, TimeoutError | urllib3.exceptions.TimeoutError)


def _reason(error: Exception) -> str:
    """Return the error's message without the objects with which the library's messages begin."""
    return str(error).rpartition(": ")[2] or type(error).__name__
