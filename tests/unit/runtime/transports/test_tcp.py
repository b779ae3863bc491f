"""What is particular to connections: strangers are passed over."""

import socket


def test_a_stranger_is_passed_over(link, weights):
    ends = link("tcp")
    with socket.create_connection(ends.ends[1].listener.getsockname()) as stranger:
        stranger.sendall(b"x" * 100)
        _, (taken,) = ends.update()
        assert [name for name, _ in taken.result(30)] == list(weights)


def test_the_end_that_sends_does_not_listen(link):
    assert link("tcp").ends[0].listener is None
