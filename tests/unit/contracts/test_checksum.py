"""What a sampler tells of the weights that came: the same for the same ones, another for others."""

from __future__ import annotations

import pytest
import torch

from engine_core.contracts.checksum import Checksum


def weights(dtype=torch.float32):
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    return [("a", values[:30_000].view(300, 100)), ("b", values[30_000:])]


def checksum(tensors):
    found = Checksum()
    found.add(tensors)
    return found.result()


def with_one(tensors, change):
    """The first tensor changed in place by ``change``, in a copy."""
    (name, first), *others = tensors
    first = first.clone()
    change(first)
    return [(name, first), *others]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_value_that_differs_by_its_last_bit_is_seen_wherever_it_is(dtype):
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    first = checksum(weights(dtype))

    def turned(place):
        def change(tensor):
            tensor.view(whole).view(-1)[place] ^= 1

        return change

    assert all(checksum(with_one(weights(dtype), turned(place))) != first for place in (0, 1, 17_777, 29_999))


def test_it_does_not_depend_on_how_the_stream_is_cut_nor_on_threads():
    passed = Checksum()
    assert [name for name, _ in passed.of(iter(weights()))] == ["a", "b"]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        many = passed.result(), checksum([weights()[0]])
        torch.set_num_threads(1)
        again = Checksum()
        list(again.of(weights()))
        assert (again.result(), checksum([weights()[0]])) == many
    finally:
        torch.set_num_threads(before)


def test_names_shapes_and_types_count_beside_values():
    (_, first), other = weights()
    found = {
        checksum(tensors)
        for tensors in (
            weights(),
            [("c", first), other],
            [("a", first.view(100, 300)), other],
            [("a", first.double()), other],
            [other, ("a", first)],
        )
    }
    assert len(found) == 5


def test_of_whole_numbers_every_byte_counts():
    config = torch.frombuffer(bytearray(b'{"r": 8, "lora_alpha": 16}' * 40), dtype=torch.uint8)
    first = checksum([("adapter_config.json", config)])
    assert checksum([("adapter_config.json", config.clone())]) == first
    swapped = config.clone()
    swapped[[7, 8]] = swapped[[8, 7]]
    assert checksum([("adapter_config.json", swapped)]) != first


def test_no_weights_and_empty_ones_have_a_checksum():
    assert checksum([]) != checksum([("a", torch.zeros(0))])


def test_a_part_of_a_larger_tensor_counts_by_its_own_values():
    whole = torch.arange(24.0).view(4, 6)
    assert checksum([("a", whole[:, ::2])]) == checksum([("a", whole[:, ::2].clone())])


def test_a_whole_number_of_a_column_has_the_checksum_of_its_copy():
    column = torch.arange(12).view(3, 4)[:1, 2]  # torch calls one number contiguous, whatever its stride is
    assert checksum([("a", column)]) == checksum([("a", column.clone())])
