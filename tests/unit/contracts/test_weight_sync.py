"""Streams of weights in buckets of bounded size; what a sampler in the same process is given."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from engine_core.contracts.weight_sync import (
    ADAPTER_CONFIG,
    buckets,
    common_dtype,
    rounded,
    same_process,
    sends_adapter,
    stream_of,
)


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
    config = None

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


def mapping(answer):
    """An actor whose plugins answer ``engine_map_weights`` with ``answer``, and what they were given."""
    given = {}

    def hook(**arguments):
        given.update(arguments)
        return answer(arguments["weights"])

    def step(role, *backends):
        given.update(role=role, backends=backends)
        return SimpleNamespace(engine_map_weights=hook)

    class Mapped(Actor):
        config, model_config = SimpleNamespace(backend="gru"), object()
        context = SimpleNamespace(plugins=SimpleNamespace(step=step))
        read = 0

        def named_weights(self, to="all", adapter=False):
            for name in ("policy.a", "policy.b", "value.weight", "last"):
                self.read += 1
                yield name, torch.ones(2)

    return Mapped(), given


SAMPLER = SimpleNamespace(backend="mine", options=object())


def test_a_plugin_maps_weights_on_their_way_to_the_sampler():
    actor, given = mapping(
        lambda weights: ((n.removeprefix("policy."), w) for n, w in weights if n != "value.weight")
    )
    assert [name for name, _ in stream_of(actor, adapter=False, sampler=SAMPLER)] == ["a", "b", "last"]
    assert given["backends"] == (("rollout_engines", "mine"), ("train_engines", "gru"))
    assert (given["role"], given["sampler"]) == ("rollout", "mine")
    assert (given["model_config"], given["options"]) == (actor.model_config, SAMPLER.options)


def test_weights_that_no_plugin_maps_come_as_they_are():
    actor, _ = mapping(lambda weights: None)
    assert len(list(stream_of(actor, adapter=False, sampler=SAMPLER))) == 4
    again, given = mapping(lambda weights: [])
    assert len(list(stream_of(again, adapter=False))) == 4  # for another role than a sampler
    assert not given


def test_what_a_plugin_does_not_read_is_read_after_it_because_all_ranks_take_part():
    actor, _ = mapping(lambda weights: [next(weights)])
    assert [name for name, _ in stream_of(actor, adapter=False, sampler=SAMPLER)] == ["policy.a"]
    assert actor.read == 4


def test_floating_point_weights_of_larger_types_are_cast_and_others_stay():
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64)
    weights = [(str(kind), torch.ones(2).to(kind)) for kind in kinds]
    half = (torch.bfloat16, torch.bfloat16, *kinds[2:])
    assert [tensor.dtype for _, tensor in rounded(weights, torch.bfloat16)] == [*half]
    assert [tensor for _, tensor in rounded(weights, None)] == [tensor for _, tensor in weights]
    (_, third), *_ = rounded([("w", torch.tensor([1 / 3]))], torch.bfloat16)
    assert third.item() == 0.333984375  # 171 / 512, 8 significant bits


def test_the_common_type_of_weights_is_that_of_all_with_floating_point():
    one = [torch.ones(2), torch.ones(1, dtype=torch.int64), torch.zeros(3)]
    assert common_dtype(one) is torch.float32
    assert common_dtype([*one, torch.ones(1).half()]) is None
    assert common_dtype([]) is None
