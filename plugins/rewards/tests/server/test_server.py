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
    """Return ``serve(max_samples=2)``: a running server and its service; stopped at the end."""
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


def free_again(server):
    """Return whether a slot that was taken can be used again; until then a client gets 503 or a reset."""
    for _ in range(1000):
        with contextlib.suppress(ConnectionError):
            if ask(server, samples("a"))[0] == 200:
                return True
        time.sleep(0.02)
    return False


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
        (b"<html>", 400, "the body is no JSON"),
        (b"[" * 100_000, 400, "the body is no JSON"),
        (b"[]", 400, "expected {"),
        ({"prompts": []}, 400, "completions must be a list of texts"),
        ({"completions": "abc"}, 400, "completions must be a list of texts"),
        ({"completions": [1]}, 400, "completions must be texts"),
        ({"completions": ["a"], "prompts": ["a", "b"]}, 400, "prompts must be a list of 1 values"),
        ({"completions": ["a"], "columns": {"answer": "a"}}, 400, "answer must be a list of 1 values"),
        ({"completions": ["a"], "columns": []}, 400, "expected {"),
        ({"completions": ["a"] * 5}, 413, "5 samples, at most 4 are taken at once"),
        (b" " * 2001, 413, "the body has 2001 bytes, at most 2000 are taken"),
    ],
)
def test_a_body_that_is_not_what_it_should_be_is_refused(serve, body, status, reason):
    server = serve(max_samples=4, max_body_bytes=2000)
    if isinstance(body, bytes) and len(body) == 100_000:
        body = body[:1999]
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
    server = serve(read_seconds=0.2, max_connections=1)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as client:
        answer = b""
        with contextlib.suppress(ConnectionError):  # closed while this wrote, or with something unread
            client.sendall(sent)
            answer = client.makefile("rb").read()  # ends
    assert answer == b"" or b"400" in answer
    assert free_again(server)


def test_a_client_that_does_not_take_its_answer_loses_its_connection(serve):
    server = serve(read_seconds=0.2, max_connections=1)
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
        places = [server.slots.acquire(timeout=60)]  # its slot is free again, though it is still connected
    server.slots.release()
    assert places == [True]


def test_more_connections_than_there_are_places_for_are_told_to_come_again(serve):
    server = serve(max_connections=1)
    server.service.gate = threading.Event()
    first: list = []
    waiting = threading.Thread(target=lambda: first.append(ask(server, samples("a"))))
    waiting.start()
    assert server.service.begun.wait(60)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as client:
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"Retry-After: 1" in answer
    server.service.gate.set()
    waiting.join()
    assert first[0][0] == 200


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
