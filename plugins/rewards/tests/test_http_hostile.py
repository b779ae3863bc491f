"""The reward ``http`` against malicious servers and name servers: time, memory, addresses, secrets."""

import contextlib
import gzip
import shutil
import socket
import ssl
import subprocess
import threading
import time

import pytest
from pydantic import ValidationError

from engine_core.errors import ConfigError
from engine_plugin_rewards.http_scorer import make_http
from engine_plugin_rewards.plugin import HTTPOptions

HEAD = b"HTTP/1.1 200 OK\r\n"
QUICK = {"attempt_timeout_seconds": 4.0, "backoff_seconds": 0.01, "retries": 1}


def ask(url, words=("a", "bb"), timeout=5.0, **options):
    settings = HTTPOptions(url=url, **{**QUICK, **options})
    function = make_http(**settings.model_dump(), timeout=timeout)
    return function(prompts=["Q"] * len(words), completions=list(words))


@pytest.fixture
def raw_server():
    """Return ``raw_server(write)``: the address of a server that answers each connection by ``write(connection)``."""
    opened = []

    def serve(write):
        listener = socket.create_server(("127.0.0.1", 0))
        opened.append(listener)

        def answer(connection):
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                write(connection)

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/"

    yield serve
    for listener in opened:
        listener.close()


def again_and_again(start, part):
    """Return a writer that sends ``start``, then ``part`` every 10 ms, for longer than any attempt may take."""

    def write(connection):
        connection.sendall(start)
        for _ in range(600):
            connection.sendall(part)
            time.sleep(0.01)

    return write


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (HEAD, b"X: x\r\n"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (HEAD + b"Content-Length: 9000\r\n\r\n", b" "),
    ],
    ids=["headers", "chunks", "a body"],
)
def test_an_answer_that_never_ends_costs_its_tries_and_no_more(raw_server, start, part):
    found = ask(raw_server(again_and_again(start, part)), attempt_timeout_seconds=0.3)
    # more than 100 headers are refused before the time is over
    ends = ("no whole answer within 0.3 s (try 2 of 2)", "got more than 100 headers (try 2 of 2)")
    assert all(str(error).endswith(ends) for error in found), found


def test_a_body_of_gigabytes_is_left_where_it_is(raw_server):
    found = ask(
        raw_server(again_and_again(HEAD + b"Content-Length: 99999999999\r\n\r\n", b" " * 500_000)),
        attempt_timeout_seconds=5,
        max_response_kb=64,
    )
    assert {str(error) for error in found} == {"the response is longer than 64 KB (max_response_kb)"}


def test_a_packed_answer_is_not_unpacked(scorer_server):
    bomb = gzip.compress(b'{"scores": [1, 2]}' + b" " * 50_000_000)

    def packed(handler, sent):
        handler.answer(bomb, headers=[("Content-Encoding", "gzip")])

    found = ask(scorer_server(packed).url, attempt_timeout_seconds=60)
    assert all("the response is no JSON: '\\x1f" in str(error) for error in found)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_wherever_it_leads(scorer_server, code):
    other = scorer_server()
    for target in (other.url, "http://169.254.169.254/latest/meta-data/"):

        def redirect(handler, sent, target=target):
            handler.answer(b"", code, [("Location", target)])

        assert {str(error) for error in ask(scorer_server(redirect).url)} == {f"status {code}: ''"}
    assert other.seen == []


# -- addresses --------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://h\\@169.254.169.254/"}, "written down|read differently"),
        ({"url": "http://h/\tx"}, "read differently"),
        ({"url": "http://h\u3002test/"}, "read differently"),
        ({"url": "http://h/", "secret_headers": {"Host": "A_KEY"}}, "'Host' is no header that can be set"),
        ({"url": "http://h/", "secret_headers": {"X: y\r\nZ": "A_KEY"}}, "no header that can be set"),
        ({"url": "http://h/", "secret_headers": {"X-Key": "JUDGE"}}, "would not be kept out of logs"),
        ({"url": "http://h/", "requests_per_second": 0}, "greater than 0"),
    ],
)
def test_an_address_or_header_that_may_not_be_is_refused_with_the_options(options, message):
    with pytest.raises(ValidationError, match=message):
        HTTPOptions(**options)


@pytest.fixture
def scorer_name(monkeypatch):
    """Make ``scorer.test`` resolve to this machine."""
    really = socket.getaddrinfo

    def look_up(host, port, *args, **kwargs):
        return really("127.0.0.1" if host == "scorer.test" else host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.usefixtures("scorer_name")
def test_the_server_is_asked_by_its_name(scorer_server):
    server = scorer_server()
    assert ask(server.url.replace("127.0.0.1", "scorer.test"), attempt_timeout_seconds=5) == [1.0, 2.0]
    assert server.seen[0][1]["Host"] == f"scorer.test:{server.server_port}"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
@pytest.mark.usefixtures("scorer_name")
def test_over_tls_the_certificate_must_be_the_names(scorer_server, monkeypatch, tmp_path):
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=scorer.test",
    ]
    made += ["-addext", "subjectAltName=DNS:scorer.test", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    server = scorer_server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    port = server.server_port
    assert ask(f"https://scorer.test:{port}/", attempt_timeout_seconds=5) == [1.0, 2.0]
    refused = ask(f"https://localhost:{port}/", attempt_timeout_seconds=5)
    assert all("certificate" in str(error) for error in refused), refused
    assert len(server.seen) == 1


# -- secrets and pace -------------------------------------------------------


@pytest.mark.parametrize(
    "token", ["s3cr3t-" + "v" * 400, "a'b\\c\"d", "abc"], ids=["long", "quotes", "short"]
)
@pytest.mark.parametrize("place", [0, 155])
def test_no_part_of_a_secret_is_in_a_message_wherever_the_message_is_cut(
    scorer_server, monkeypatch, token, place
):
    monkeypatch.setenv("SCORER_TOKEN", token)
    monkeypatch.setenv("JUDGE_KEY", token[::-1])

    def echo(handler, sent):
        said = handler.headers["Authorization"].removeprefix("Bearer ") + handler.headers["X-Api-Key"]
        quoted = "." * place + said
        if len(server.seen) == 1:
            handler.answer({"scores": [quoted, None], "errors": {"1": quoted}})
        else:
            handler.answer(quoted.encode(), 400)

    server = scorer_server(echo)
    options = {"token_env": "SCORER_TOKEN", "secret_headers": {"X-Api-Key": "JUDGE_KEY"}}
    for _ in range(2):
        for error in ask(server.url, **options):
            assert isinstance(error, Exception)
            assert token[:3] not in str(error).replace("'", "", 1)
            assert "[reda" in str(error)


def test_a_header_whose_variable_is_not_set_is_refused_by_name(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"secret_headers\.X-Api-Key: \$JUDGE_KEY is not set"):
        ask("http://127.0.0.1/", secret_headers={"X-Api-Key": "JUDGE_KEY"})


def test_more_requests_than_the_pace_allows_are_time_outs(scorer_server):
    server = scorer_server()
    found = ask(server.url, ["a"] * 4, batch_size=1, requests_per_second=0.01, timeout=2.0)
    assert sorted(map(str, found)) == ["1.0", *["requests_per_second leaves no time for a try"] * 3]
    assert len(server.seen) == 1
