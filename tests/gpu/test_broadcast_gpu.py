"""Weights from one GPU to another by NCCL, with both ends of the link as threads of this process.

pytest -m gpu tests/gpu/test_broadcast_gpu.py
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine_core.contracts.weight_transport import TransportEndpoint, WeightUpdate
from engine_core.errors import TrainingFailed
from engine_plugin_processes.transports import bucketing
from engine_plugin_processes.transports.broadcast import Broadcast
from engine_plugin_processes.transports.table import BroadcastOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SECONDS = 60


@pytest.fixture
def weights():
    torch.manual_seed(0)
    sizes = {"a": (300, 7), "b": (70_000,), "empty": (0, 3), "c": (5,)}
    return {name: torch.randn(size, device="cuda:0").to(torch.bfloat16) for name, size in sizes.items()}


@pytest.fixture
def link(tmp_path, monkeypatch):
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", 5000)  # several buckets, one larger than that
    pool, ends = ThreadPoolExecutor(2), []

    def make(devices=("cuda:0", "cuda:1"), seconds=30.0):
        for index, device in enumerate(devices):
            rendezvous = {"file": str(tmp_path / "meet"), "tcp": None}
            endpoint = TransportEndpoint(
                transport="broadcast",
                index=index,
                names=("sender", "receiver"),
                device=torch.device(device),
                host="127.0.0.1",
                token="t",
                rendezvous=rendezvous,
                link_id="l",
            )
            ends.append(Broadcast(BroadcastOptions(timeout_seconds=seconds), endpoint))
        peers = [end.open() for end in ends]
        for met in [pool.submit(end.join, peers) for end in ends]:
            met.result(SECONDS)
        return pool, ends

    yield make
    for end in ends:
        end.close()
    pool.shutdown()


def update(pool, ends, weights, number=1):
    def take():
        torch.cuda.set_device(ends[1].endpoint.device)
        return dict(ends[1].receive(WeightUpdate(number, number)))

    taken = pool.submit(take)
    sent = pool.submit(ends[0].send, weights.items(), WeightUpdate(number, number))
    return sent.result(SECONDS), taken.result(SECONDS)


def test_weights_come_to_the_other_gpu_bit_for_bit_update_after_update(link, weights):
    pool, ends = link()
    assert ends[0].bytes_group is not None
    for number in (1, 2, 3):
        sent, found = update(pool, ends, weights, number)
        assert sent == sum(tensor.numel() * 2 for tensor in weights.values())
        assert {tensor.device for tensor in found.values()} == {torch.device("cuda:1")}
        assert all(torch.equal(found[name].cpu(), tensor.cpu()) for name, tensor in weights.items())


def test_ends_on_one_gpu_send_through_host_memory(link, weights):
    pool, ends = link(devices=("cuda:0", "cuda:0"))
    assert ends[0].bytes_group is None
    _, found = update(pool, ends, weights)
    assert all(torch.equal(found[name].cpu(), tensor.cpu()) for name, tensor in weights.items())


def test_a_sender_that_does_not_send_is_told_in_time(link):
    pool, ends = link(seconds=1.0)
    with pytest.raises(TrainingFailed, match=r"rollout\.broadcast\.timeout_seconds"):
        pool.submit(lambda: list(ends[1].receive(WeightUpdate(1, 1)))).result(SECONDS)
