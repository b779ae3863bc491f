"""The server of the live page."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import struct
import threading

import pytest

from engine_core.errors import EnvironmentProblem
from engine_plugin_tools.watch import watch_server


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.resolved.toml").write_text('trainer = "sft"\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "actor/loss": 2.0}\n')
    return tmp_path


@pytest.fixture
def get(run):
    """Return ``get(path, host)``: status, headers and body of an answer."""
    with watch_server([run], 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

        def get(path, host=f"127.0.0.1:{server.server_port}"):
            client = http.client.HTTPConnection("127.0.0.1", server.server_port)
            client.request("GET", path, headers={"Host": host})
            answer = client.getresponse()
            return answer.status, answer.headers, answer.read().decode()

        yield get
        server.shutdown()


def test_the_page_is_live_and_its_data_are_read_again_when_they_change(get, run):
    status, headers, text = get("/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert 'data-live="1"' in text
    assert '"sets":null' in text  # the first answer does not wait for rollouts
    first = json.loads(get("/data.json")[2])
    assert get(f"/data.json?{first['tag']}")[::2] == (204, "")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "actor/loss": 1.0}\n')
    second = json.loads(get(f"/data.json?{first['tag']}")[2])
    assert second["runs"][0]["metrics"]["actor/loss"] == [2.0, 1.0]


def test_other_names_and_paths_are_refused(get):
    assert get("/", host="example.com")[0] == 403  # a site whose name resolves to loopback
    assert get("/config.resolved.toml")[0] == 404
    assert get("/", host="localhost:1")[0] == 200


def test_a_run_that_is_deleted_and_a_reader_who_leaves_print_no_traceback(run, capsys):
    (run / "config.resolved.toml").write_text(f'x = "{"y" * 10_000_000}"\n')
    with watch_server([run], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        with socket.create_connection(server.server_address) as client:
            client.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            client.recv(1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes at once
        shutil.rmtree(run)
        client = http.client.HTTPConnection(*server.server_address)
        client.request("GET", "/data.json")
        answer = client.getresponse()
        assert answer.status == 503
        assert str(run) in answer.read().decode()
        server.shutdown()
    assert capsys.readouterr().err == ""


def test_a_port_in_use_says_what_to_do(run):
    with watch_server([run], 0) as server, pytest.raises(EnvironmentProblem, match="0 takes a free one"):
        watch_server([run], server.server_port)
    assert server.server_address[0] == "127.0.0.1"
