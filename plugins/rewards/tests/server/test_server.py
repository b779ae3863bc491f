"""The server against clients that are wrong, slow, many or unauthorized."""

import contextlib
import http.client
import json
import socket
import threading
import time

import pytest

from engine_core.errors import ConfigError, DataError
from engine_core.rewards.signatures import Outcome
from engine_plugin_rewards.server.server import RewardServer, is_loopback


class Service:
    """A service whose scores are lengths; it raises ``fault`` and waits for ``gate``."""

    name = "lengths"

    def __init__(self):
        self.scored, self.fault, self.gate, self.begun = 0, None, None, threading.Event()

    def score(self, samples, count):
        self.begun.set()
        if self.gate:
            assert self.gate.wait(60)
        if self.fault:
            raise self.fault
        self.scored += count
        return [
            Outcome(failure="error", message="empty") if not text else Outcome(len(text) / 3)
            for text in samples["completions"]
        ]


@pytest.fixture
def serve():
    """Return ``serve(max_body_bytes=2000)``: a running server and its service; stopped at the end."""
    running = []

    def start(**settings):
        server = RewardServer(Service(), **settings)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(server, body=None, method="POST", path="/score", headers=(), host="127.0.0.1"):
    """Return status and JSON of one request; ``body`` is encoded as JSON unless it is bytes."""
    connection = http.client.HTTPConnection(host, server.server_port, timeout=60)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json", **dict(headers)})
    response = connection.getresponse()
    found = response.status, json.loads(response.read() or b"null")
    connection.close()
    return found


def samples(*words, **columns):
    return {"prompts": ["Q"] * len(words), "completions": list(words), "columns": columns}


def test_scores_failures_and_health(serve):
    server = serve()
    assert ask(server, samples("a", "", "bb")) == (
        200,
        {"scores": [1 / 3, None, 2 / 3], "errors": {"1": "empty"}},
    )
    assert ask(server, samples()) == (200, {"scores": [], "errors": {}})
    assert ask(server, method="GET", path="/health") == (
        200,
        {"status": "ok", "reward": "lengths", "scored": 3},
    )


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"<html>", 400, "expected JSON: {"),
        (b"[" * 1999, 400, "expected JSON: {"),
        (b"[]", 400, "expected JSON: {"),
        (b"3", 400, "expected JSON: {"),
        ({"prompts": []}, 400, "expected JSON: {"),
        ({"completions": "abc"}, 400, "expected JSON: {"),
        ({"completions": [1]}, 400, "the first two of texts"),
        ({"completions": ["a"], "prompts": ["a", "b"]}, 400, "lists of one length"),
        ({"completions": ["a"], "columns": {"answer": "a"}}, 400, "expected JSON: {"),
        ({"completions": ["a"], "columns": []}, 400, "expected JSON: {"),
        (b" " * 2001, 413, "the body has 2001 bytes, at most 2000 are taken"),
    ],
)
def test_a_body_that_is_not_what_it_should_be_is_refused(serve, body, status, reason):
    server = serve(max_body_bytes=2000)
    found, said = ask(server, body)
    assert (found, reason in said["error"]) == (status, True), said
    assert ask(server, samples("a"))[0] == 200


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ({"path": "/"}, 404),
        ({"path": "/score", "method": "GET"}, 404),
        ({"path": "/health"}, 404),
        ({"method": "PUT"}, 501),
        ({"headers": {"Content-Type": "text/plain"}}, 415),  # what an HTML form could send
        ({"headers": {"Host": "evil.example"}}, 403),  # a host name that resolves to loopback
        ({"headers": {"Host": "localhost:1"}}, 200),
        ({"headers": {"Transfer-Encoding": "chunked"}}, 411),
        ({"headers": {"Content-Length": "-1"}}, 411),
        ({"headers": {"Content-Length": "9" * 30}}, 413),
    ],
)
def test_a_request_that_is_not_what_it_should_be_is_refused(serve, arguments, status):
    server = serve()
    sent = {"method": "POST", "path": "/score", "headers": {}} | arguments
    body = json.dumps(samples("a"))
    headers = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": len(body)} | sent[
        "headers"
    ]
    lines = [
        f"{sent['method']} {sent['path']} HTTP/1.1",
        *(f"{k}: {v}" for k, v in headers.items()),
        "",
        body,
    ]
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as client:
        client.sendall("\r\n".join(lines).encode())
        assert client.makefile("rb").readline().split()[1] == str(status).encode()


def test_an_error_of_the_reward_is_told_and_a_bug_is_not(serve, caplog):
    server = serve()
    server.service.fault = DataError("needs 'answer', which was not sent")
    assert ask(server, samples("a")) == (422, {"error": "needs 'answer', which was not sent"})
    server.service.fault = RuntimeError("secret path")
    assert ask(server, samples("a")) == (500, {"error": "the reward failed; see the server's log"})
    assert "secret path" in caplog.text
    server.service.fault = None
    assert ask(server, samples("a"))[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /score HT",
        b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    ],
)
def test_a_client_that_does_not_finish_loses_its_connection(serve, sent):
    server = serve(idle_seconds=0.2)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as client:
        answer = b""
        with contextlib.suppress(ConnectionError):  # closed while this wrote, or with something unread
            client.sendall(sent)
            answer = client.makefile("rb").read()  # ends
    assert answer == b"" or b"400" in answer
    assert ask(server, samples("a"))[0] == 200


def test_a_client_that_does_not_take_its_answer_loses_its_connection(serve):
    server = serve(idle_seconds=0.2)
    server.service.fault = DataError("x" * (8 << 20))  # more than the buffers of both sides hold
    request = json.dumps(samples("a")).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.server_port))
        client.sendall(
            b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(request), request)
        )
        assert server.service.begun.wait(60)
        server.shutdown()
        server.server_close()  # ends, though the client is still connected


def test_a_stop_does_not_wait_for_connections_without_a_request(serve):
    server = serve(idle_seconds=600.0)
    address = ("127.0.0.1", server.server_port)
    with contextlib.ExitStack() as clients:
        for _ in range(8):
            clients.enter_context(socket.create_connection(address))
        while len(server.silent) < 8:
            time.sleep(0.01)
        server.shutdown()
        server.server_close()  # ends
    assert not server.silent


def test_a_stop_answers_what_was_asked_before(serve):
    server = serve()
    server.service.gate = threading.Event()
    first: list = []
    waiting = threading.Thread(target=lambda: first.append(ask(server, samples("abc"))))
    waiting.start()
    assert server.service.begun.wait(60)
    server.shutdown()
    closing = threading.Thread(target=server.server_close)
    closing.start()
    server.service.gate.set()
    closing.join()
    waiting.join()
    assert first == [(200, {"scores": [1.0], "errors": {}})]


def test_every_request_needs_the_token(serve):
    server = serve(token="a-long-enough-token")
    right = {"Authorization": "Bearer a-long-enough-token"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "a-long-enough-token"}):
        assert ask(server, samples("a"), headers=headers)[0] == 401
        assert ask(server, method="GET", path="/health", headers=headers)[0] == 401
    assert ask(server, samples("a"), headers=right)[0] == 200


def test_an_address_that_others_reach_needs_a_token():
    with pytest.raises(
        ConfigError, match=r"--host 0\.0\.0\.0 is open to other machines: it needs --token-env"
    ):
        RewardServer(Service(), host="0.0.0.0")
    open_to_all = RewardServer(Service(), host="0.0.0.0", token="a-long-enough-token")
    open_to_all.server_close()


def test_an_address_that_is_taken_or_wrong_is_refused_with_the_reason(serve):
    server = serve()
    with pytest.raises(
        ConfigError, match=rf"--host 127\.0\.0\.1 --port {server.server_port}: Address already in use"
    ):
        RewardServer(Service(), port=server.server_port)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_what_is_loopback(host, expected):
    assert is_loopback(host) is expected
