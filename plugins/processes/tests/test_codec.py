"""What crosses between processes comes back equal; nothing else crosses, whatever the bytes say."""

import dataclasses
import datetime
import gc
import math
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext
from msgspec.msgpack import encode as msgpack

from engine_core.errors import DataError
from engine_core.types import Batch, LossCall, Prompt, Request, Rollout, Sampling
from engine_plugin_processes.codec import CODES, CROSSING, DTYPES, TENSOR, DecodeError, decode, encode

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def there_and_back(value):
    encoded = encode(value)
    return decode(encoded.header, bytearray(b"".join(encoded.buffers)))


@given(PLAIN)
def test_plain_values_come_back_equal(value):
    assert there_and_back(value) == value


def test_values_that_json_does_not_know_come_back_with_their_types():
    value = {
        "keys": {1: "a", None: "b"},
        "path": Path("a/b"),
        "bytes": b"\x00\xff",
        "when": datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC),
        "infinite": math.inf,
    }
    found = there_and_back(value)
    assert found == value
    assert [type(found[key]) for key in value] == [type(entry) for entry in value.values()]
    assert math.isnan(there_and_back(float("nan")))
    assert there_and_back((1, (2.5, "x"), datetime.date(2026, 1, 2))) == [1, [2.5, "x"], "2026-01-02"]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0)], ids=str)
def test_tensors_come_back_bit_for_bit(dtype, shape):
    tensor = (torch.rand(shape) * 5).to(dtype)
    found = there_and_back([tensor, tensor])
    for each in found:
        assert each.dtype == dtype
        assert each.shape == tensor.shape
        assert torch.equal(each, tensor)


def test_a_tensor_with_gradient_or_strides_comes_as_its_values():
    tensor = torch.arange(6.0, requires_grad=True).reshape(2, 3).t()
    found = there_and_back(tensor)
    assert torch.equal(found, tensor.detach())
    assert not found.requires_grad
    assert torch.equal(found, tensor)


def rollout(prompt, index):
    return Rollout(
        request_id=f"0:0:{index}",
        prompt=prompt,
        token_ids=torch.tensor([5, 9, 7]),
        loss_mask=torch.tensor([False, False, True]),
        rollout_log_probs=torch.tensor([0.0, 0.0, -0.5]),
        policy_versions=torch.tensor([0, 0, 3], dtype=torch.int32),
        finish_reason="stop",
        index=index,
        extras={"support_log_mass": torch.zeros(3)},
    )


def test_batches_requests_and_rollouts_come_back_and_requests_share_their_prompt():
    prompt = Prompt("train:1", [5, 9], "2+2=", {"answer": "4"})
    batch = Batch(torch.tensor([1, 2, 3]), torch.tensor([2, 1]), {"x": torch.ones(3)}, {"r": torch.ones(2)})
    found = there_and_back(batch)
    assert torch.equal(found["x"], batch["x"])
    assert found.keep_together is None
    requests = [Request(f"0:0:{i}", prompt, Sampling(seed=2**62 + i, stop=("a",)), 0, i) for i in range(2)]
    first, second = there_and_back({"plain": {"requests": requests}})["plain"]["requests"]
    assert [first, second] == requests
    assert first.prompt is second.prompt
    assert requests[0].prompt is prompt
    assert encode(requests).header.count(b"2+2=") == 1
    call = LossCall("ppo_clip", {"clip": 0.2, "names": ["a"]}, watched=("entropy",))
    assert there_and_back(call) == call


def test_of_a_rollouts_prompt_its_id_alone_crosses():
    prompt = Prompt("train:1", [5, 9], "2+2=", {"answer": "4"})
    sent = [rollout(prompt, 0), rollout(prompt, 1)]
    found = there_and_back(sent)
    assert [each.prompt for each in found] == [Prompt("train:1", [], "")] * 2
    assert sent[0].prompt is prompt


def test_rollouts_come_back_each_with_fields_of_its_own():
    prompts = [Prompt("train:1", [5, 9], "2+2="), Prompt("train:2", [5], "a", {"answer": "4"})]
    sent = [rollout(prompts[index % 2], index) for index in range(3)]
    sent[1].rewards["math"] = 1.0
    sent[2].token_ids = torch.arange(5)
    first, second, third = found = there_and_back(sent)
    assert [each.request_id for each in found] == ["0:0:0", "0:0:1", "0:0:2"]
    assert [each.rewards for each in found] == [{}, {"math": 1.0}, {}]
    first.answers["math"], first.messages[:] = "4", [{"role": "user"}]
    assert (second.answers, second.messages) == ({}, [])
    assert third.token_ids.tolist() == [0, 1, 2, 3, 4]
    for each, before in zip(found, sent, strict=True):
        for name in ("token_ids", "loss_mask", "rollout_log_probs", "policy_versions"):
            assert getattr(each, name).dtype == getattr(before, name).dtype
            assert torch.equal(getattr(each, name), getattr(before, name))
        assert torch.equal(each.extras["support_log_mass"], before.extras["support_log_mass"])


def test_a_response_that_was_begun_comes_back_with_its_requests_prompt():
    prompt = Prompt("train:1", [5, 9], "2+2=")
    begun = rollout(prompt, 0)
    requests = [
        Request("0:0:0", prompt, Sampling(), begun=begun),
        Request("0:0:1", prompt, Sampling(stop=("a",), top_p=1)),
    ]
    first, second = there_and_back(requests)
    assert first.begun.prompt is first.prompt is second.prompt
    assert begun.prompt is prompt
    assert torch.equal(first.begun.token_ids, begun.token_ids)
    assert second == requests[1]
    assert first.sampling == Sampling()


@pytest.mark.parametrize("count", [1, 2])
def test_tensors_of_rollouts_that_are_empty_or_no_vectors_come_back(count):
    sent = [rollout(Prompt("train:1", [], ""), index) for index in range(count)]
    for each in sent:
        each.policy_versions, each.rollout_log_probs = torch.zeros(0, dtype=torch.int32), torch.rand(2, 3)
    for each, before in zip(there_and_back(sent), sent, strict=True):
        assert (each.policy_versions.shape, each.policy_versions.dtype) == ((0,), torch.int32)
        assert torch.equal(each.rollout_log_probs, before.rollout_log_probs)


class Mine:
    pass


@dataclasses.dataclass
class Other:
    number: int


@pytest.mark.parametrize("value", [Mine(), {"a": [Mine()]}, Other(1), len, Mine, torch.zeros(2).to_sparse()])
def test_what_is_not_in_the_set_is_refused_before_it_is_sent(value):
    with pytest.raises((TypeError, NotImplementedError, RuntimeError)):
        encode(value)


def test_a_refusal_names_the_type():
    with pytest.raises(TypeError, match=r"A .*Mine does not cross between processes"):
        encode({"plain": {"a": [0, Mine()]}})


def tensor(*reference):
    return Ext(TENSOR, msgpack(reference))


HOSTILE = {
    "an unknown extension": Ext(99, b""),
    "bytes beyond the payload": tensor("float32", 0, (4,)),  # 16 bytes of 8
    "a negative length": tensor("float32", 0, (-1,)),
    "two negative lengths": tensor("float32", 0, (-1, -1)),
    "an overflow": tensor("float32", 0, (1 << 61, 1 << 61)),
    "an unknown dtype": tensor("object", 0, (1,)),
    "a negative offset": tensor("float32", -4, (1,)),
    "a reference that is none": Ext(TENSOR, msgpack("no")),
    "a class without its fields": Ext(CODES[Batch], msgpack({"no": 1})),
    "a field of another type": Ext(CODES[LossCall], msgpack({"name": 1, "params": {}})),
    "a tensor that is none": Ext(CODES[Batch], msgpack({"token_ids": 1, "lengths": 2})),
    "rollouts that are none": Ext(CODES[Rollout], msgpack([{"request_id": "a"}])),
    "requests without prompts": Ext(
        CODES[Request],
        msgpack(([], [0], [{"id": "a", "prompt": {"id": "", "token_ids": [], "text": ""}, "sampling": {}}])),
    ),
    "another number of requests": Ext(CODES[Request], msgpack(([], [0], []))),
}


@pytest.mark.parametrize("value", [2**100, "\ud83d"])
def test_a_column_that_cannot_be_encoded_is_refused_with_its_prompt(value):
    good, bad = Prompt("train:0", [1], "", {"answer": 1}), Prompt("train:7", [1], "", {"answer": value})
    asked = [Request(f"r{n}", prompt, Sampling()) for n, prompt in enumerate((good, bad))]
    with pytest.raises(DataError, match=r"Prompt 'train:7' cannot be sent .* Store the integer as text\."):
        encode({"requests": asked})


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_bytes_of_somebody_else_make_nothing(value):
    for header in (msgpack(value), msgpack({"a": [value]})):
        with pytest.raises(DecodeError):
            decode(header, bytearray(8))


@pytest.mark.parametrize("header", [b"", b"\xc1", b"\x92\x01", b"\x91" * 100_000])
def test_a_header_that_is_no_message_is_refused(header):
    with pytest.raises(DecodeError):
        decode(header, bytearray())


def test_only_the_vocabulary_crosses():
    names = "Batch", "LossCall", "Request", "Rollout", "StepOutput", "TrainOutput", "Layout", "SyncResult"
    assert {cls.__name__ for cls in CROSSING} == set(names)


@pytest.mark.parametrize(
    "value", [[1, 2, 3], [], [1.5, None, "a", True], [1, [2, 3]], [[1], {"a": [1, [2]]}]]
)
def test_lists_of_plain_values_come_as_they_went(value):
    found = there_and_back(value)
    assert found == value
    assert [type(entry) for entry in found] == [type(entry) for entry in value]


def test_what_was_sent_is_freed_without_a_collection():
    gc.disable()
    try:
        encoded = encode({"weights": torch.zeros(1000)})
        array = weakref.ref(encoded.buffers[0].obj)
        assert array() is not None
        del encoded
        assert array() is None
    finally:
        gc.enable()
