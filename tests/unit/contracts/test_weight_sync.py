"""Streams of weights in buckets of bounded size; what a sampler in the same process is given."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from engine_core.contracts.weight_sync import ADAPTER_CONFIG, buckets, same_process, sends_adapter, stream_of


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


class Actor:
    def adapter_config(self):
        return b'{"r": 4}'

    def named_weights(self, to="all", adapter=False):
        name = "base_model.model.q.lora_A.weight" if adapter else "q.weight"
        yield f"{name} to {to}", torch.ones(2)


class Sampler:
    def update_weights(self, stream, version):
        self.taken = dict(stream)
        return "sum"


def test_an_adapter_comes_with_the_file_that_tells_what_it_is():
    found = dict(stream_of(Actor(), adapter=True, to="leader"))
    assert list(found) == [ADAPTER_CONFIG, "base_model.model.q.lora_A.weight to leader"]
    assert found[ADAPTER_CONFIG].numpy().tobytes() == b'{"r": 4}'
    assert [name for name, _ in stream_of(Actor(), adapter=False)] == ["q.weight to all"]


def test_the_sampler_of_the_same_process_takes_what_it_is_meant_to():
    sampler = Sampler()
    result = same_process(Actor(), sampler, 3, shared=False)
    assert (list(sampler.taken), result.bytes, result.checksum) == (["q.weight to all"], 8, "sum")
    assert same_process(Actor(), sampler, 3, shared=False, adapter=True).bytes == 16


def test_an_adapter_is_sent_where_there_is_one_and_the_samplers_options_say_so():
    def config(lora, options):
        return SimpleNamespace(actor=SimpleNamespace(lora=lora), rollout=SimpleNamespace(options=options))

    asked = SimpleNamespace(adapter=True)
    assert sends_adapter(config(object(), asked))
    for lora, options in ((None, asked), (object(), SimpleNamespace(adapter=False)), (object(), None)):
        assert not sends_adapter(config(lora, options))
