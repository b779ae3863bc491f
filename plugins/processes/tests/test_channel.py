"""Messages over real sockets; a peer without the run's token gets nowhere."""

import contextlib
import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine_plugin_processes import channel
from engine_plugin_processes.channel import Channel, Closed, callers, connect, listen, new_token
from engine_plugin_processes.codec import DecodeError, encode

SECONDS = 60.0  # where something is waited for that comes at once


@pytest.fixture
def ends():
    left, right = map(Channel, socket.socketpair())
    yield left, right
    left.close()
    right.close()


def test_messages_larger_than_any_buffer_come_in_order_from_several_threads(ends):
    left, right = ends
    tensors = [torch.rand(1_000_000 + i) for i in range(4)]
    with ThreadPoolExecutor() as pool:
        sent = [
            pool.submit(left.send, {"id": i, "t": t, "many": [t[:1]] * 2000}) for i, t in enumerate(tensors)
        ]
        found = {message["id"]: message for message in (right.receive() for _ in tensors)}
    assert [future.result() for future in sent] == [None] * 4
    assert all(torch.equal(found[i]["t"], tensors[i]) for i in range(4))
    assert all(len(found[i]["many"]) == 2000 for i in range(4))


def test_one_encoding_is_sent_to_many(ends):
    left, right = ends
    encoded = encode({"t": torch.arange(3)})
    left.send(encoded)
    left.send(encoded)
    assert right.receive()["t"].tolist() == right.receive()["t"].tolist() == [0, 1, 2]


def test_the_end_of_the_other_side_is_told_to_reader_and_writer(ends):
    left, right = ends
    left.socket.sendall(b"\0" * 10)  # a message that breaks off
    left.close()
    with pytest.raises(Closed):
        right.receive()
    with pytest.raises(Closed):
        right.send({"t": torch.zeros(10_000_000)})


def test_what_is_no_message_is_refused_before_memory_is_taken(ends):
    left, right = ends
    left.socket.sendall(b"\xff" * 16)
    with pytest.raises(DecodeError, match="none of ours"):
        right.receive()


@pytest.fixture
def listener():
    with listen("127.0.0.1") as found:
        yield found


def first(listener, token, seconds=SECONDS):
    """The first peer that knows the token; None where none came in time."""
    with contextlib.closing(callers(listener, token, time.monotonic() + seconds)) as coming:
        return next(coming, None)


def test_peers_that_know_the_token_are_connected_with_their_rank(listener):
    token = new_token()
    with ThreadPoolExecutor() as pool:
        served = pool.submit(first, listener, token)
        mine = connect(listener.getsockname(), token, 7, 5)
        rank, theirs = served.result()
    theirs.send("hello")
    assert (rank, mine.receive()) == (7, "hello")
    mine.close()
    theirs.close()


def test_a_caller_with_another_token_is_sent_away_and_so_is_a_listener(listener):
    with ThreadPoolExecutor() as pool:
        served = pool.submit(first, listener, new_token(), 3.0)
        with pytest.raises(Closed, match="does not know the run's token"):
            connect(listener.getsockname(), new_token(), 0, 5)
        assert served.result() is None


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 60, b"short", b""])
def test_a_stranger_who_talks_is_sent_away(listener, monkeypatch, said):
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.5)
    token = new_token()
    with ThreadPoolExecutor() as pool, socket.create_connection(listener.getsockname()) as stranger:
        served = pool.submit(first, listener, token)
        stranger.sendall(said)
        stranger.settimeout(SECONDS)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(100):
                pass
        assert not served.done()  # others may still come
        connect(listener.getsockname(), token, 3, 5).close()
        assert served.result()[0] == 3


def test_strangers_who_say_nothing_are_sent_away_one_after_another(listener, monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.2)
    token = new_token()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        for _ in range(5):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        served = pool.submit(first, listener, token)
        connect(listener.getsockname(), token, 7, SECONDS).close()
        assert served.result()[0] == 7


def test_strangers_who_keep_calling_do_not_move_the_deadline(listener, persistent):
    persistent(listener.getsockname())
    coming = callers(listener, new_token(), time.monotonic() + 0.5, look_seconds=0.05)
    assert not any(itertools.islice(coming, 100))
    assert next(coming, "over") == "over"


def test_whoever_waits_may_look_while_strangers_keep_calling(listener, persistent):
    persistent(listener.getsockname())
    with contextlib.closing(callers(listener, new_token(), time.monotonic() + SECONDS, 0.05)) as coming:
        assert [next(coming) for _ in range(3)] == [None] * 3


def test_one_who_knows_the_token_is_found_among_strangers_who_keep_calling(listener, persistent):
    persistent(listener.getsockname())
    token = new_token()
    with ThreadPoolExecutor() as pool:
        served = pool.submit(first, listener, token)
        connect(listener.getsockname(), token, 7, 5).close()
        assert served.result()[0] == 7


def test_the_token_itself_is_never_sent(listener):
    token, seen = new_token(), bytearray()
    with socket.create_server(("127.0.0.1", 0)) as tap, ThreadPoolExecutor() as pool:

        def relay():
            near, _ = tap.accept()
            with near, socket.create_connection(listener.getsockname()) as far:

                def copy(source, target):
                    while data := source.recv(4096):
                        seen.extend(data)
                        target.sendall(data)

                thread = threading.Thread(target=copy, args=(far, near), daemon=True)
                thread.start()
                copy(near, far)

        relayed = pool.submit(relay)
        served = pool.submit(first, listener, token)
        mine = connect(tap.getsockname(), token, 1, 5)
        _, theirs = served.result()
        mine.close()
        theirs.close()
        relayed.exception()
    assert len(seen) > 60
    assert token.encode() not in seen
    assert bytes.fromhex(token) not in seen
