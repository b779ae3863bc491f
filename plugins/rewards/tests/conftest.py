"""A scoring server on loopback that misbehaves on purpose, one way a request."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Scripted(BaseHTTPRequestHandler):
    """A handler that answers each request by the next way of ``server.ways``, and then always by the last."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        with self.server.lock:
            self.server.active += 1
            self.server.most = max(self.server.most, self.server.active)
            way = self.server.ways.pop(0) if len(self.server.ways) > 1 else self.server.ways[0]
            self.server.seen.append((self.path, dict(self.headers), time.monotonic()))
        try:
            sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.bodies.append(sent)
            way(self, sent)
        finally:
            with self.server.lock:
                self.server.active -= 1

    def answer(self, body, status=200, headers=()):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def lengths(handler, sent):
    """Answer correctly: the length of each completion."""
    handler.answer({"scores": [len(text) for text in sent["completions"]]})


@pytest.fixture
def scorer_server():
    """Return a function ``scorer_server(way, way, ...)`` that starts a server with ``url``, ``bodies`` and ``seen``."""
    servers = []

    def serve(*ways):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
        server.ways, server.bodies, server.seen = list(ways or (lengths,)), [], []
        server.lock, server.active, server.most = threading.Lock(), 0, 0
        server.url = f"http://127.0.0.1:{server.server_port}/score"
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server

    serve.lengths = lengths
    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()
