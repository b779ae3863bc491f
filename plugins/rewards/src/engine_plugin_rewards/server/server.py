"""The HTTP server: ``GET /health`` and ``POST /score``, one request a connection, within limits.

::

    POST /score {"prompts": ["2+2="], "completions": ["4"], "columns": {"answer": ["4"]}}
    200         {"scores": [1.0], "errors": {}}

A float32 score passes unchanged: JSON has the shortest decimal that reads back as the same number. Limits: length of a
request, samples in it, seconds to send it and to read the answer, connections at a time; above the last a client gets
503 with ``Retry-After``. Only JSON is accepted, and on loopback only requests for a loopback host, so that a page in a
browser cannot send one.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import logging
import socket
import socketserver
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from engine_plugin_rewards.server.service import RewardService

log = logging.getLogger("engine")

BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
LINGER_SECONDS = 1.0  # to read what a refused client still sends


class Refused(Exception):
    """An error: a request is answered with a status and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class RewardServer(ThreadingHTTPServer):
    """A server of one reward, until it is shut down; ``server_close`` returns when running requests are answered.

    Args:
        service: scores samples.
        host: the address to bind; another than loopback needs a token.
        port: the port; 0 takes a free one, which ``url`` shows.
        token: the token that every request must carry.
        max_body_bytes: maximum size of a request.
        max_samples: maximum number of samples in one request.
        read_seconds: time limit to send a request, and again to read the answer.
        max_connections: maximum number of concurrent connections.

    Raises:
        ConfigError: the address cannot be bound, or is open to others without a token.
    """

    daemon_threads = False  # joined by server_close
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self,
        service: RewardService,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        max_body_bytes: int = 32 << 20,
        max_samples: int = 4096,
        read_seconds: float = 30.0,
        max_connections: int = 64,
    ) -> None:
        self.service, self.token, self.loopback = service, token, is_loopback(host)
        self.max_body_bytes, self.max_samples, self.read_seconds = max_body_bytes, max_samples, read_seconds
        self.slots = threading.BoundedSemaphore(max_connections)
        if not self.loopback and not token:
            raise ConfigError(f"--host {host} is open to other machines: it needs --token-env as well.")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}.") from error

    @property
    def url(self) -> str:
        """The address to which samples are posted."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/score"

    def server_bind(self) -> None:
        """Bind without the look-up of the host's name in HTTPServer, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for the connection, or answer 503 above the limit; re-raise what prevents the start."""
        if not self.slots.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.sendall(BUSY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection and free its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a broken connection at level debug; it is not the server's error."""
        log.debug("A connection broke off.", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """A handler of the one request of a connection."""

    server: RewardServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "engine", ""

    def handle(self) -> None:
        """Read the request within its time, answer, close."""
        self.close_connection = True
        self._begin_to_wait()
        try:
            self.handle_one_request()
        finally:
            self.late.cancel()

    def _begin_to_wait(self) -> None:
        """Start a timer that closes the connection after ``read_seconds``."""
        self.late = threading.Timer(self.server.read_seconds, self._hang_up)
        self.late.daemon = True
        self.late.start()

    def do_GET(self) -> None:
        """Answer ``/health``."""
        self._respond(self._health)

    def do_POST(self) -> None:
        """Answer ``/score``."""
        self._respond(self._score)

    def log_message(self, format: str, *args: Any) -> None:
        """Log at level debug."""
        log.debug("%s: %s", self.address_string(), format % args)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _respond(self, answer: Any) -> None:
        try:
            status, body = 200, answer()
        except Refused as refused:
            status, body = refused.status, {"error": str(refused)}
        except EngineError as error:
            status, body = 422, {"error": str(error)}
        except Exception:
            log.exception("A request to score failed.")
            status, body = 500, {"error": "the reward failed; see the server's log"}
        data = json.dumps(body, allow_nan=False).encode()
        self.close_connection = True
        self.late.cancel()
        self._begin_to_wait()  # a client that does not read would keep its slot and delay a stop
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        if 400 <= status < 422:  # otherwise the reset for unread bytes could overtake the answer
            self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LINGER_SECONDS)
            left = 64
            while left and self.connection.recv(1 << 16):
                left -= 1

    def _health(self) -> dict[str, Any]:
        if self.path != "/health":
            raise Refused(404, "there is GET /health and POST /score")
        self._admit()
        return {"status": "ok", "reward": self.server.service.name, "scored": self.server.service.scored}

    def _score(self) -> dict[str, Any]:
        if self.path != "/score":
            raise Refused(404, "there is GET /health and POST /score")
        self._admit()
        samples, count = samples_in(self._body(), self.server.max_samples)
        self.late.cancel()
        outcomes = self.server.service.score(samples, count)
        return {
            "scores": [None if outcome.failure else outcome.value for outcome in outcomes],
            "errors": {str(i): outcome.message for i, outcome in enumerate(outcomes) if outcome.failure},
        }

    def _admit(self) -> None:
        """Refuse a request without the token, and a web page that reached loopback by another host's name."""
        if self.server.token is not None:
            brought, wanted = self.headers.get("Authorization", ""), f"Bearer {self.server.token}"
            if not hmac.compare_digest(brought.encode("utf-8", "replace"), wanted.encode()):
                raise Refused(401, "the token is missing or wrong")
        if self.server.loopback and not is_loopback(_host_of(self.headers.get("Host", ""))):
            raise Refused(403, "the server answers on loopback only")

    def _body(self) -> bytes:
        if self.headers.get_content_type() != "application/json":
            raise Refused(415, "Content-Type must be application/json")
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            raise Refused(411, "Content-Length is needed")
        if len(length) > 15 or int(length) > self.server.max_body_bytes:
            raise Refused(413, f"the body has {length} bytes, at most {self.server.max_body_bytes} are taken")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise Refused(400, "the body broke off")
        return body


def samples_in(body: bytes, most: int) -> tuple[dict[str, Sequence[Any]], int]:
    """Return the columns of a request, and their number of samples.

    Raises:
        Refused: the body is not in the server's format.
    """
    try:
        sent = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {str(error)[:100]}") from None
    columns = sent.get("columns", {}) if isinstance(sent, dict) else None
    if not isinstance(sent, dict) or not isinstance(columns, Mapping):
        raise Refused(400, 'expected {"prompts": [...], "completions": [...], "columns": {...}}')
    samples: dict[str, Any] = dict(columns) | {
        key: sent[key] for key in ("prompts", "completions") if key in sent
    }
    completions = samples.get("completions")
    if not isinstance(completions, list):
        raise Refused(400, "completions must be a list of texts")
    for name, values in samples.items():
        if not isinstance(values, list) or len(values) != len(completions):
            raise Refused(400, f"{name} must be a list of {len(completions)} values, as many as completions")
        if name in ("prompts", "completions") and not all(isinstance(value, str) for value in values):
            raise Refused(400, f"{name} must be texts")
    if len(completions) > most:
        raise Refused(413, f"{len(completions)} samples, at most {most} are taken at once")
    return samples, len(completions)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_of(header: str) -> str:
    """Remove the port: ``[::1]:8000``, ``localhost:8000``."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
