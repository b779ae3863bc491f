"""A server on loopback for the live page of runs, which asks again while the runs continue."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine_core.errors import DataError, EnvironmentProblem
from engine_plugin_tools.report import as_json, page, page_data
from engine_plugin_tools.run_state import run_state

HOST = "127.0.0.1"


def watch_server(paths: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Return a server of the page of some runs, which ``serve_forever`` starts.

    ``/`` is the page; ``/data.json?TAG`` its newer data, or 204 if nothing has changed since ``TAG``.

    Args:
        paths: the run folders.
        port: the port on loopback; 0: a free one.

    Raises:
        EnvironmentProblem: the port is in use.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # a web site whose name resolves to loopback sends its own name
            if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            address, _, known = self.path.partition("?")
            if address not in ("/", "/data.json"):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            html = address == "/"  # answered at once; the page then asks for the rollouts
            try:
                tag = _tag(paths)
                if known == tag:
                    self.send_response(HTTPStatus.NO_CONTENT)
                    self.end_headers()
                    return
                data = page_data(paths, rollouts=not html) | {"tag": "" if html else tag}
            except (OSError, DataError) as error:  # a run was deleted, or rewound while it was read
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
                return
            body = (page(data, live=True) if html else as_json(data)).encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8" if html else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the reader has left
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print no line for each request."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise EnvironmentProblem(
            f"--port {port}: {error.strerror or error}. Choose another port; 0 takes a free one."
        ) from error


def _tag(paths: Sequence[Path]) -> str:
    """Return a text that changes with the states of the runs and their stored rollouts."""
    files = [sorted(str(file) for file in (path / "rollouts").rglob("*.parquet")) for path in paths]
    return hashlib.sha256(repr(([run_state(path) for path in paths], files)).encode()).hexdigest()[:16]
