"""Weights in buckets: what is taken out is what was put in, and a checksum sees damage."""

import random
import struct

import pytest
import torch

from engine_plugin_processes.transports import bucketing
from engine_plugin_processes.transports.bucketing import checksum, flat_buckets, unpacked

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


@pytest.mark.parametrize("words", [0, 1, 50, 333, 350, 4021])
def test_the_checksum_is_that_of_whole_numbers_also_over_several_rows(monkeypatch, words):
    monkeypatch.setattr(bucketing, "ROW_WORDS", 50)
    data = torch.randint(0, 256, (8 * words,), dtype=torch.uint8)
    assert checksum(data) == slow_checksum(data.numpy().tobytes())


def test_a_flipped_bit_and_two_words_that_changed_places_are_seen():
    data = torch.randint(0, 256, (8 * 100,), dtype=torch.uint8)
    hurt = [data.clone() for _ in range(50)]
    for copy, bit in zip(hurt, random.sample(range(8 * len(data)), 50), strict=True):
        copy[bit // 8] ^= 1 << bit % 8
    words = data.view(torch.int64).clone()
    words[[3, 90]] = words[[90, 3]]
    assert checksum(data) not in [checksum(copy) for copy in (*hurt, words.view(torch.uint8))]


def test_every_tensor_is_in_its_bucket_as_it_was(monkeypatch):
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", 70)
    found, count = {}, 0
    for flat in flat_buckets(WEIGHTS.items(), torch.device("cpu")):
        assert flat.sum == slow_checksum(flat.data.numpy().tobytes())
        found |= {name: tensor.clone() for name, tensor in unpacked(flat.data, flat.entries)}
        count += 1
    assert count > 3
    assert list(found) == list(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_type_that_does_not_cross_is_named():
    with pytest.raises(TypeError, match=r"Weight 'z' is of complex64"):
        next(flat_buckets([("z", torch.zeros(2, dtype=torch.complex64))], torch.device("cpu")))
