"""The time of a try; hostile servers are tested with the reward ``http`` of plugins/rewards."""

import socket

import pytest
from urllib3.connection import HTTPConnection

from engine_plugin_processes.http.connections import Connections, Passing


def test_the_addresses_of_a_name_share_the_time_of_a_try(monkeypatch):
    """urllib3 tries one after the other, each for the whole time-out of the connection."""
    allowed = []

    def silent(connection):
        allowed.append(connection.timeout)
        raise TimeoutError

    monkeypatch.setattr(HTTPConnection, "connect", silent)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [("any",)] * 4)
    with pytest.raises(Passing, match=r"no connection within 2 s"):
        Connections("http://many.example/score").exchange(b"", {}, 2.0, 100)
    assert 0.4 < allowed[0] <= 0.5


def test_a_name_that_is_not_known_is_no_connection(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(Passing, match="no connection: "):
        Connections("http://nowhere.example/").exchange(b"", {}, 2.0, 100)
