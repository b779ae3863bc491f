"""The pace of requests; tries, secrets and hostile servers are tested with the reward ``http`` of plugins/rewards."""

import socket
import time

import pytest

from engine_plugin_processes.http import requests as asking
from engine_plugin_processes.http.options import ServerOptions
from engine_plugin_processes.http.requests import Asker, NoAnswer, Pace


def test_requests_go_out_at_even_distances_and_none_waits_past_its_deadline(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(asking.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(asking.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    pace, sent = Pace(4.0), []
    for _ in range(4):
        assert pace.wait(deadline=101.0)
        sent.append(clock[0])
    assert sent == [100.0, 100.25, 100.5, 100.75]
    assert not pace.wait(deadline=101.0)
    clock[0] = 200.0
    assert pace.wait(deadline=201.0)  # no credit for the time in which nothing was asked, and no debt
    assert (clock[0], pace.next) == (200.0, 200.25)


def test_a_name_that_is_not_known_is_no_connection(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    asker = Asker(ServerOptions(url="http://nowhere.example/", retries=0), "reward.http", 100)
    with pytest.raises(NoAnswer, match="no connection: "):
        asker.answer(b"", time.monotonic() + 2.0)
