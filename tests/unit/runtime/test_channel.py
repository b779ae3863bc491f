"""Messages over real sockets; a peer without the run's token gets nowhere."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine_core.runtime import channel
from engine_core.runtime.channel import Channel, Closed, accept, connect, listen, new_token, pair
from engine_core.runtime.codec import NotOurs, encode


@pytest.fixture
def ends():
    left, right = map(Channel, pair())
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
    with pytest.raises(NotOurs, match="none of ours"):
        right.receive()


@pytest.fixture
def listener():
    with listen("127.0.0.1") as found:
        yield found


def test_peers_that_know_the_token_are_connected_with_their_rank(listener):
    token = new_token()
    with ThreadPoolExecutor() as pool:
        served = pool.submit(accept, listener, token)
        mine = connect(listener.getsockname(), token, 7, 5)
        rank, theirs = served.result()
    theirs.send("hello")
    assert (rank, mine.receive()) == (7, "hello")
    mine.close()
    theirs.close()


def test_a_caller_with_another_token_is_sent_away_and_so_is_a_listener(listener):
    with ThreadPoolExecutor() as pool:
        served = pool.submit(accept, listener, new_token())
        with pytest.raises(Closed, match="does not know the run's token"):
            connect(listener.getsockname(), new_token(), 0, 5)
        assert served.result() is None


def test_a_stranger_who_talks_is_sent_away(listener, monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.5)
    for said in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 60, b"short", b""):
        with ThreadPoolExecutor() as pool, socket.create_connection(listener.getsockname()) as stranger:
            served = pool.submit(accept, listener, new_token())
            stranger.sendall(said)
            assert served.result() is None


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
        served = pool.submit(accept, listener, token)
        mine = connect(tap.getsockname(), token, 1, 5)
        _, theirs = served.result()
        mine.close()
        theirs.close()
        relayed.exception()
    assert len(seen) > 60
    assert token.encode() not in seen
    assert bytes.fromhex(token) not in seen
