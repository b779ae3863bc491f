"""Weights on their way to a process through memory of a device: whole there, and kept for a process after it."""

import queue
import threading

import pytest
import torch

from engine_plugin_processes import buckets
from engine_plugin_processes.buckets import received
from engine_plugin_processes.sampler_process.memory import HostMemory
from engine_plugin_processes.sampler_process.process import Lost
from engine_plugin_processes.sampler_process.weights import Weights
from engine_plugin_processes.transports.bucketing import PrivateBuffer

WEIGHTS = {"a": torch.randn(60), "b": torch.randn(7).bfloat16(), "c": torch.randn(100), "d": torch.tensor(2)}


class DeviceStandIn(PrivateBuffer):
    """Memory that a process of this test can see; CUDA's has its own test on a GPU."""

    def told(self):
        return {"handle": "of the device"}


class Process:
    """A thread in the place of a process; ``dies``: it is lost after so many buckets."""

    def __init__(self, weights, dies=None):
        self.weights, self.dies, self.places = weights, dies, []
        self.inbox, self.outbox = queue.Queue(), queue.Queue()
        self.found = {}

    def next_number(self):
        return 1

    def send(self, message):
        if message["kind"] == "update":
            self.thread = threading.Thread(target=self._take, daemon=True)
            self.thread.start()
        else:
            self.inbox.put(message)

    def answer_to(self, number):
        answer = self.outbox.get(timeout=10)
        if answer == "lost":
            raise Lost("it ended")
        return answer

    def _seen(self, told):
        self.places.append(bool(told))
        return self.weights.device_memory if told else self.weights.host

    def _take(self):
        def answer(bucket, ok):
            self.outbox.put("lost" if self.dies == bucket else {"bucket": bucket, "ok": ok})

        for name, tensor in received(self.inbox.get, answer, 1, self._seen):
            self.found[name] = tensor.clone()
        self.outbox.put({"value": "sum"})


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 200)

    def make(device=True, **how):
        weights = Weights(HostMemory(HostMemory.new_file()), None, None, **how)
        if device:
            weights.device_memory = DeviceStandIn(torch.device("cpu"))
        return weights

    return make


def whole(process, of=WEIGHTS):
    assert list(process.found) == list(of)
    assert all(torch.equal(process.found[name], tensor) for name, tensor in of.items())


def test_weights_go_through_the_device_and_a_new_process_gets_them_from_host_memory(made):
    weights = made()
    for number in (1, 2):
        process, new = {name: number * tensor for name, tensor in WEIGHTS.items()}, Process(weights)
        assert weights.update([new], iter(process.items()), number) == ["sum"]
        whole(new, process)
        assert all(new.places)
    after = Process(weights)
    assert weights.push(after) == "sum"
    whole(after, process)
    assert not any(after.places)


def test_what_a_process_that_was_lost_has_not_taken_is_kept_too(made):
    weights = made()
    (found,) = weights.update([Process(weights, dies=1)], iter(WEIGHTS.items()), 1)
    assert isinstance(found, Lost)
    after = Process(weights)
    weights.push(after)
    whole(after)


@pytest.mark.parametrize("device", [True, False])
def test_nothing_is_kept_where_no_process_can_come_after_it(made, device):
    weights = made(device, again=False)
    process = Process(weights)
    weights.update([process], iter(WEIGHTS.items()), 1)
    whole(process)
    assert weights._kept == []
