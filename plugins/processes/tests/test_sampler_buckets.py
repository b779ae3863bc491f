"""Weights in buckets: what arrives is what was sent, whatever happens to a bucket on its way."""

import queue
import random
import struct
import threading

import pytest
import torch

from engine_core.errors import TrainingFailed
from engine_plugin_processes import buckets
from engine_plugin_processes.buckets import Delivery, checksum, grouped, planned, received
from engine_plugin_processes.sampler_process.memory import HostMemory

WEIGHTS = {
    "a": torch.randn(3, 5),
    "b": torch.randn(7).bfloat16(),
    "c": torch.tensor(2.5),
    "d": torch.tensor([True, False, True]),
    "e": torch.randn(40, 40),  # larger than a bucket
    "f": torch.empty(0, 4),
    "g": torch.randn(6, 6).t(),  # not contiguous
}


def slow_checksum(data):
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    plain = sum(words) % 2**64
    weighed = sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64
    return f"{plain:016x}{weighed:016x}"


@pytest.mark.parametrize("words", [0, 1, 50, 333, 350])
@pytest.mark.parametrize("way", ["_by_chunks", "_at_once"])  # of a CPU, of a GPU
def test_the_checksum_is_that_of_whole_numbers_also_over_several_chunks(monkeypatch, way, words):
    monkeypatch.setattr(buckets, "CHUNK_WORDS", 50)
    monkeypatch.setattr(buckets, "_by_chunks", getattr(buckets, way))
    buckets._factors.cache_clear()
    data = torch.randint(0, 256, (8 * words,), dtype=torch.uint8)
    assert checksum(data) == slow_checksum(data.numpy().tobytes())
    buckets._factors.cache_clear()


def test_a_flipped_bit_and_two_words_that_changed_places_are_seen():
    data = torch.randint(0, 256, (8 * 100,), dtype=torch.uint8)
    hurt = [data.clone() for _ in range(50)]
    for copy, bit in zip(hurt, random.sample(range(8 * len(data)), 50), strict=True):
        copy[bit // 8] ^= 1 << bit % 8
    words = data.view(torch.int64).clone()
    words[[3, 90]] = words[[90, 3]]
    assert checksum(data) not in [checksum(copy) for copy in (*hurt, words.view(torch.uint8))]


class Wire:
    """Owner and process as two threads, with a hand on what passes between them."""

    def __init__(self, hurt=lambda memory, message: message):
        self.to_process, self.to_owner = queue.Queue(), queue.Queue()
        self.memory = HostMemory(HostMemory.new_file())
        self.hurt, self.sent = hurt, []

    def post(self, message):
        self.sent.append((message["kind"], message.get("bucket")))
        if (passed := self.hurt(self.memory, message)) is not None:
            self.to_process.put(passed)

    def take_all(self):
        def answer(bucket, ok):
            self.to_owner.put({"id": 1, "bucket": bucket, "ok": ok})

        self.found = {}
        try:
            for name, tensor in received(self.to_process.get, answer, 1, lambda told: self.memory):
                self.found[name] = tensor.clone()
            self.to_owner.put({"id": 1, "value": "sum"})
        except TrainingFailed as error:
            self.to_owner.put({"id": 1, "error": str(error)})

    def bring(self, weights=WEIGHTS):
        process = threading.Thread(target=self.take_all, daemon=True)
        process.start()
        delivery = Delivery(self.post, lambda: self.to_owner.get(timeout=30), 1, self.memory)
        try:
            offset = 0
            for tensors in grouped(weights.items()):
                bucket = planned(tensors, offset)
                offset += bucket.size
                self.memory.reserve(offset)
                delivery.put(bucket, tensors)
            return delivery.finish()
        finally:
            process.join(30)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 200)


def same(found):
    assert list(found) == list(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_every_tensor_arrives_as_it_was():
    wire = Wire()
    assert wire.bring()["value"] == "sum"
    same(wire.found)
    assert [kind for kind, _ in wire.sent].count("bucket") == len(list(grouped(WEIGHTS.items()))) > 3


def once(number, what):
    """Hurt bucket ``number`` the first time it passes."""
    left = [1]

    def hurt(memory, message):
        if message["kind"] == "bucket" and message["bucket"] == number and left:
            left.pop()
            return what(memory, message)
        return message

    return hurt


def flip(memory, message):
    memory.view(message["offset"], message["size"])[0] ^= 1
    return message


def drop(memory, message):
    return None


@pytest.mark.parametrize("what", [flip, drop])
@pytest.mark.parametrize("number", [0, 1, "last"])
def test_a_bucket_that_is_damaged_or_lost_once_is_sent_again(what, number):
    number = len(list(grouped(WEIGHTS.items()))) - 1 if number == "last" else number
    wire = Wire(once(number, what))
    assert wire.bring()["value"] == "sum"
    same(wire.found)
    assert wire.sent.count(("bucket", number)) == 2


@pytest.mark.parametrize("what", [flip, drop])
def test_a_bucket_that_is_hurt_twice_ends_the_update(what):
    def hurt(memory, message):
        return what(memory, message) if message.get("bucket") == 1 else message

    wire = Wire(hurt)
    with pytest.raises(TrainingFailed, match="bucket 1 of the update came damaged, twice"):
        wire.bring()
    assert wire.sent.count(("bucket", 1)) == 2
    assert wire.sent[-1][0] == "break"
    assert "b" not in wire.found or torch.equal(wire.found["b"], WEIGHTS["b"])  # nothing damaged went on


def test_what_is_left_over_from_another_update_is_not_looked_at():
    wire = Wire()
    wire.to_process.put({"kind": "bucket", "id": 0, "round": 0, "bucket": 0})
    wire.to_process.put({"kind": "end", "id": 0, "round": 0, "count": 0})
    wire.bring()
    same(wire.found)


def test_a_type_that_does_not_cross_is_named():
    with pytest.raises(TypeError, match=r"Weight 'z' is of complex64"):
        planned([("z", torch.zeros(2, dtype=torch.complex64))], 0)
