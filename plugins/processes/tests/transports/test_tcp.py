"""What is particular to connections: strangers are passed over."""

import socket

import pytest

from engine_core.contracts.weight_transport import WeightUpdate
from engine_core.errors import TrainingFailed


def test_a_stranger_is_passed_over(link, weights):
    ends = link("tcp")
    with socket.create_connection(ends.ends[1].listener.getsockname()) as stranger:
        stranger.sendall(b"x" * 100)
        _, (taken,) = ends.update()
        assert [name for name, _ in taken.result(30)] == list(weights)


def test_the_end_that_sends_does_not_listen(link):
    assert link("tcp").ends[0].listener is None


def test_a_sender_that_does_not_come_is_missed_in_time_however_often_strangers_call(link, persistent):
    receiver = link("tcp", timeout_seconds=0.5).ends[1]
    persistent(receiver.listener.getsockname())
    with pytest.raises(TrainingFailed, match="none came"):
        list(receiver.receive(WeightUpdate(1, 7)))
