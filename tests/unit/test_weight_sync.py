"""Streams of weights in buckets of bounded size."""

from __future__ import annotations

import torch

from engine_core.weight_sync import buckets


def names(sizes, limit, bytes_of=None):
    stream = ((str(number), torch.zeros(size, dtype=torch.uint8)) for number, size in enumerate(sizes))
    return [[name for name, _ in bucket] for bucket in buckets(stream, limit, bytes_of)]


def test_a_bucket_holds_at_most_its_limit_and_a_larger_tensor_is_alone():
    assert names([4, 4, 4, 9, 1, 8], 8) == [["0", "1"], ["2"], ["3"], ["4"], ["5"]]
    assert names([], 8) == []


def test_bytes_count_as_the_caller_counts_them():
    assert names([1, 1, 1], 8, lambda tensor: 4 * tensor.numel()) == [["0", "1"], ["2"]]


def test_a_stream_is_read_no_further_than_the_bucket_that_is_asked_for():
    read = []

    def stream():
        for number in range(9):
            read.append(number)
            yield str(number), torch.zeros(4, dtype=torch.uint8)

    assert len(next(buckets(stream(), 8))) == 2
    assert read == [0, 1, 2]
