"""The HTTP server: ``GET /health`` and ``POST /score``, one request a connection, within limits.

::

    POST /score {"prompts": ["2+2="], "completions": ["4"], "columns": {"answer": ["4"]}}
    200         {"scores": [1.0], "errors": {}}

A float32 score passes unchanged: JSON has the shortest decimal that reads back as the same number. Only JSON is
accepted, and on loopback only requests for a loopback host, so that a page in a browser cannot send one.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import logging
import socket
import socketserver
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from engine_plugin_rewards.server.service import RewardService

log = logging.getLogger("engine")

EXPECTED = (
    'expected JSON: {"prompts": [...], "completions": [...], "columns": {NAME: [...]}}, lists of one length, the first '
    "two of texts"
)


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
        idle_seconds: after which a client that neither sends nor reads is left.

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
        idle_seconds: float = 30.0,
    ) -> None:
        self.service, self.token, self.loopback = service, token, is_loopback(host)
        self.max_body_bytes, self.idle_seconds = max_body_bytes, idle_seconds
        self.silent: set[socket.socket] = set()  # connections without a request so far
        require_token(host, token)
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

    def server_close(self) -> None:
        """Close the listener, end the connections without a request, and wait for the others."""
        for connection in self.silent.copy():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a broken connection at level debug; it is not the server's error."""
        log.debug("A connection broke off.", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """A handler of the one request of a connection."""

    server: RewardServer
    server_version, sys_version = "engine", ""

    def setup(self) -> None:
        """Set the time limit of the connection."""
        self.request.settimeout(self.server.idle_seconds)
        self.server.silent.add(self.request)
        super().setup()

    def finish(self) -> None:
        """Forget the connection."""
        self.server.silent.discard(self.request)
        super().finish()

    def do_GET(self) -> None:
        """Answer ``/health``."""
        self._respond("/health", self._health)

    def do_POST(self) -> None:
        """Answer ``/score``."""
        self._respond("/score", self._score)

    def log_message(self, format: str, *args: Any) -> None:
        """Log at level debug."""
        log.debug("%s: %s", self.address_string(), format % args)

    def _respond(self, path: str, answer: Callable[[], dict[str, Any]]) -> None:
        self.server.silent.discard(self.request)
        try:
            if self.path != path:
                raise Refused(404, "there is GET /health and POST /score")
            self._admit()
            status, body = 200, answer()
        except Refused as refused:
            status, body = refused.status, {"error": str(refused)}
        except EngineError as error:
            status, body = 422, {"error": str(error)}
        except TimeoutError:  # of a client that does not send
            raise
        except Exception:
            log.exception("A request to score failed.")
            status, body = 500, {"error": "the reward failed; see the server's log"}
        data = json.dumps(body, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        if status != 200:  # otherwise the reset for unread bytes could overtake the answer
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
                while self.connection.recv(1 << 16):
                    pass

    def _health(self) -> dict[str, Any]:
        return {"status": "ok", "reward": self.server.service.name, "scored": self.server.service.scored}

    def _score(self) -> dict[str, Any]:
        samples = samples_in(self._body())
        outcomes = self.server.service.score(samples, len(samples["completions"]))
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
        return self.rfile.read(int(length))


def samples_in(body: bytes) -> dict[str, list[Any]]:
    """Return the columns of a request, prompts and completions among them.

    Raises:
        Refused: the body is not in the server's format.
    """
    try:
        sent = json.loads(body)
        texts = {name: sent[name] for name in ("prompts", "completions") if name in sent}
        samples = {**sent.get("columns", {}), **texts}
        count = len(texts["completions"])
        right = all(isinstance(values, list) and len(values) == count for values in samples.values())
        right = right and all(isinstance(text, str) for values in texts.values() for text in values)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        right = False
    if not right:
        raise Refused(400, EXPECTED)
    return samples


def require_token(host: str, token: str | None) -> None:
    """Raise ``ConfigError`` for an address that other machines reach, without a token."""
    if not is_loopback(host) and not token:
        raise ConfigError(f"--host {host} is open to other machines: it needs --token-env as well.")


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
