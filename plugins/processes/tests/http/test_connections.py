"""Connections; hostile servers are tested with the reward ``http`` of plugins/rewards."""

import socket

import pytest

from engine_plugin_processes.http.connections import Connections, Passing


def test_a_name_that_is_not_known_is_no_connection(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(Passing, match="no connection: "):
        Connections("http://nowhere.example/").exchange(b"", {}, 2.0, 100)
