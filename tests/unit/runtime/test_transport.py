"""Weights over a channel: the same tensors, to every listener; a stream that breaks off is told to both sides."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine_core.errors import TrainingFailed
from engine_core.runtime import transport
from engine_core.runtime.channel import Closed, listen, new_token
from engine_core.runtime.transport import received_weights, send_weights

WEIGHTS = {
    "embed.weight": torch.rand(50, 7),
    "norm.weight": torch.rand(7).to(torch.bfloat16),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(3),
}


@pytest.fixture
def listeners():
    found = [listen("127.0.0.1") for _ in range(2)]
    yield found
    for listener in found:
        listener.close()


@pytest.mark.parametrize("bucket", [1, 500, 1 << 20])
def test_every_listener_receives_all_weights_bit_for_bit(listeners, monkeypatch, bucket):
    monkeypatch.setattr(transport, "BUCKET_BYTES", bucket)
    token = new_token()
    with ThreadPoolExecutor() as pool:
        taken = [pool.submit(lambda at=at: list(received_weights(at, token, 10))) for at in listeners]
        sent = send_weights(WEIGHTS.items(), [at.getsockname() for at in listeners], token, 0, 10)
        for received in taken:
            found = dict(received.result())
            assert list(found) == list(WEIGHTS)
            assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())
            assert all(found[name].dtype == tensor.dtype for name, tensor in WEIGHTS.items())
    assert sent == sum(tensor.numel() * tensor.element_size() for tensor in WEIGHTS.values())


def test_a_rank_that_only_takes_part_runs_the_stream_to_its_end():
    seen = []
    stream = ((name, seen.append(name) or tensor) for name, tensor in WEIGHTS.items())
    send_weights(stream, [], new_token(), 1, 10)
    assert seen == list(WEIGHTS)


def test_a_stream_that_fails_is_told_to_who_receives_it(listeners, monkeypatch):
    monkeypatch.setattr(transport, "BUCKET_BYTES", 1)
    token = new_token()

    def broken():
        yield from list(WEIGHTS.items())[:2]
        raise OSError("lost")

    with ThreadPoolExecutor() as pool:
        taken = pool.submit(lambda: list(received_weights(listeners[0], token, 10)))
        with pytest.raises(OSError, match="lost"):
            send_weights(broken(), [listeners[0].getsockname()], token, 0, 10)
        with pytest.raises(TrainingFailed, match="The stream of weights broke off"):
            taken.result()


def test_who_stops_taking_is_told_to_the_sender(listeners, monkeypatch):
    monkeypatch.setattr(transport, "BUCKET_BYTES", 1)
    token = new_token()

    def first_only():
        stream = received_weights(listeners[0], token, 10)
        next(stream)
        stream.close()

    with ThreadPoolExecutor() as pool:
        taken = pool.submit(first_only)
        with pytest.raises(Closed):
            send_weights(WEIGHTS.items(), [listeners[0].getsockname()], token, 0, 10)
        taken.result()


def test_weights_that_do_not_come_are_told(listeners):
    with pytest.raises(TrainingFailed, match="No weights came within 0 s"):
        list(received_weights(listeners[0], new_token(), 0.2))


def test_a_stranger_is_passed_over(listeners):
    token = new_token()
    with ThreadPoolExecutor() as pool:
        taken = pool.submit(lambda: list(received_weights(listeners[0], token, 10)))
        with socket.create_connection(listeners[0].getsockname()) as stranger:
            stranger.sendall(b"x" * 100)
        send_weights(WEIGHTS.items(), [listeners[0].getsockname()], token, 0, 10)
        assert [name for name, _ in taken.result()] == list(WEIGHTS)
