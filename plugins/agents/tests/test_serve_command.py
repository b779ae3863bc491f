"""The terminal's requests to a server."""

from __future__ import annotations

import http.server
import threading

import pytest

from engine_plugin_agents.serve_command import answer

ANSWER = b'data: {"choices": [{"delta": {"content": "Hello"}}]}\n\ndata: [DONE]\n\n'


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(ANSWER)

    def log_message(self, *args):
        pass


@pytest.fixture
def port():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_of_this_machine_is_asked_without_the_proxy_of_the_environment(monkeypatch, port, host):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert list(answer(f"http://{host}:{port}/v1", "key", [])) == ["Hello"]


def test_another_server_is_asked_through_the_proxy_of_the_environment(monkeypatch, port):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
    assert list(answer("http://server.invalid/v1", "key", [])) == ["Hello"]
