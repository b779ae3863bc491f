"""A host that is gone without a word is told from one whose process is busy, by what the system knows of a connection."""

import math
import socket
import struct
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from engine_plugin_processes import peer_watch as module
from engine_plugin_processes.channel import pair
from engine_plugin_processes.peer_watch import INFO_BYTES, LAST_ACK, PROBES, UNACKED, PeerWatch, end_with

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of acknowledgements")


class Wire:
    """A connection of which the system says what a test has it say."""

    family = socket.AF_INET

    def __init__(self):
        self.unacked, self.probes, self.last_ack = 0, 0, 0.0

    def getsockopt(self, level, name, size):
        info = bytearray(INFO_BYTES)
        info[PROBES] = self.probes
        struct.pack_into("=I", info, UNACKED, self.unacked)
        struct.pack_into("=I", info, LAST_ACK, int(self.last_ack * 1000))
        return bytes(info)


@pytest.fixture
def wire(monkeypatch):
    """``look(at)``: what is told when the clock says so, after a look in each second before; ``stopped``: without these."""
    made, clock = Wire(), SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    silence = PeerWatch(made)

    def look(at, stopped=False):
        before = math.floor(at - clock.now) if clock.now and not stopped else 0
        for seconds in range(before, -1, -1):
            clock.now = at - seconds
            told = silence.failure
        return told

    made.look = look
    return made


def test_what_was_sent_and_is_never_acknowledged_is_told(wire):
    wire.unacked, wire.last_ack = 3, 0.5
    assert wire.look(1000.0) == ""
    wire.last_ack = 16.0
    assert "its host has acknowledged nothing for 15 s" in wire.look(1015.5)


def test_probes_of_an_idle_connection_that_nobody_answers_are_told(wire):
    wire.probes, wire.last_ack = 1, 298.0
    assert wire.look(998.0) == ""  # one is on its way
    wire.probes, wire.last_ack = 2, 300.0
    assert wire.look(1000.0) == ""
    wire.probes, wire.last_ack = 9, 316.0
    assert wire.look(1016.0)


def test_the_time_before_something_was_sent_does_not_count(wire):
    wire.last_ack = 3600.0  # idle for an hour
    assert wire.look(1000.0) == ""
    wire.unacked, wire.last_ack = 1, 3601.0
    assert wire.look(1001.0) == ""
    wire.last_ack = 3615.0
    assert wire.look(1015.0) == ""


def test_an_acknowledgement_begins_the_count_anew(wire):
    wire.unacked, wire.last_ack = 1, 0.0
    assert wire.look(1000.0) == ""
    wire.last_ack = 1.0
    assert wire.look(1014.0) == ""
    assert wire.look(1020.0) == ""
    wire.last_ack = 16.0
    assert wire.look(1035.0)


def test_the_time_in_which_this_process_was_stopped_does_not_count(wire):
    wire.unacked, wire.last_ack = 1, 0.1
    assert wire.look(1000.0) == ""
    wire.last_ack = 19.9  # it has sent more as soon as it went on
    assert wire.look(1020.0, stopped=True) == ""
    assert wire.look(1034.0) == ""
    assert wire.look(1036.0)


def test_a_process_that_reads_nothing_is_not_silent_its_system_acknowledges(monkeypatch):
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        reader, _ = listener.accept()
    with sender, reader:
        sender.setblocking(False)
        silence, end = PeerWatch(sender), time.monotonic() + 2.0
        while time.monotonic() < end:
            try:
                sender.send(b"x" * 65536)
            except BlockingIOError:
                time.sleep(0.02)
            assert silence.failure == ""


def test_connections_within_a_machine_and_none_at_all_are_never_silent():
    left, right = pair()
    with left, right:
        for connection in (left, None):
            assert not PeerWatch(connection).known
            assert PeerWatch(connection).failure == ""
            end_with(connection, lambda: pytest.fail("ended"))


def test_whoever_depends_on_a_host_that_is_gone_is_ended_once(monkeypatch):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.05)
    wire, ended, calls = Wire(), threading.Event(), []
    wire.fileno = lambda: 3
    wire.unacked, wire.last_ack = 1, 9.0

    def end():
        calls.append(1)
        ended.set()

    end_with(wire, end)
    assert ended.wait(30)
    assert calls == [1]
