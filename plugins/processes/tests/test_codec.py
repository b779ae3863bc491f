"""What crosses between processes comes back equal; nothing else crosses, whatever the bytes say."""

import datetime
import json
import math
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_core.types import Batch, LossCall, Prompt, Request, Rollout, Sampling
from engine_plugin_processes.codec import CLASSES, DTYPES, DecodeError, decode, encode

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
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
        "tuple": (1, (2.5, "x")),
        "keys": {1: "a", None: "b", "$": "c", (1, 2): "d"},
        "path": Path("a/b"),
        "bytes": b"\x00\xff",
        "when": datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC),
        "day": datetime.date(2026, 1, 2),
        "hour": datetime.time(3, 4),
        "price": Decimal("1.10"),
        "infinite": math.inf,
    }
    found = there_and_back(value)
    assert found == value
    assert [type(found[key]) for key in value] == [type(entry) for entry in value.values()]
    assert math.isnan(there_and_back(float("nan")))


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


def test_batches_requests_and_rollouts_come_back_and_share_their_prompt():
    prompt = Prompt("train:1", [5, 9], "2+2=", {"answer": "4"})
    batch = Batch(torch.tensor([1, 2, 3]), torch.tensor([2, 1]), {"x": torch.ones(3)}, {"r": torch.ones(2)})
    found = there_and_back(batch)
    assert torch.equal(found["x"], batch["x"])
    assert found.keep_together is None
    requests = [Request(f"0:0:{i}", prompt, Sampling(seed=2**62 + i, stop=("a",)), 0, i) for i in range(2)]
    assert there_and_back(requests) == requests
    call = LossCall("ppo_clip", {"clip": 0.2, "names": ("a",)}, watched=("entropy",))
    assert there_and_back(call) == call
    first, second = there_and_back([rollout(prompt, 0), rollout(prompt, 1)])
    assert first.prompt == prompt
    assert first.prompt is second.prompt
    assert len(encode([rollout(prompt, i) for i in range(9)]).header.split(b"2+2=")) == 2


def test_rows_come_back_each_with_fields_of_its_own():
    prompts = [Prompt("train:1", [5, 9], "2+2="), Prompt("train:2", [5], "a", {"answer": "4"})]
    sent = [rollout(prompts[index % 2], index) for index in range(3)]
    sent[1].rewards["math"] = 1.0
    sent[2].token_ids = torch.arange(5)
    first, second, third = found = there_and_back(sent)
    assert [each.request_id for each in found] == ["0:0:0", "0:0:1", "0:0:2"]
    assert (first.prompt, second.prompt, third.prompt is first.prompt) == (*prompts, True)
    assert [each.rewards for each in found] == [{}, {"math": 1.0}, {}]
    first.answers["math"], first.messages[:] = "4", [{"role": "user"}]
    assert (second.answers, second.messages) == ({}, [])
    assert third.token_ids.tolist() == [0, 1, 2, 3, 4]
    for each, before in zip(found, sent, strict=True):
        for name in ("token_ids", "loss_mask", "rollout_log_probs", "policy_versions"):
            assert getattr(each, name).dtype == getattr(before, name).dtype
            assert torch.equal(getattr(each, name), getattr(before, name))
        assert torch.equal(each.extras["support_log_mass"], before.extras["support_log_mass"])


def test_rows_whose_values_differ_in_kind_come_back_equal():
    prompt = Prompt("train:1", [5, 9], "2+2=")
    begun = rollout(prompt, 0)
    requests = [
        Request("0:0:0", prompt, Sampling(), begun=begun),
        Request("0:0:1", prompt, Sampling(stop=("a",), top_p=1)),
    ]
    first, second = there_and_back(requests)
    assert first.begun.prompt is first.prompt is second.prompt
    assert torch.equal(first.begun.token_ids, begun.token_ids)
    assert second == requests[1]
    assert (first.sampling, type(second.sampling.top_p)) == (Sampling(), int)


@pytest.mark.parametrize("count", [1, 2])
def test_tensors_of_rows_that_are_empty_or_no_vectors_come_back(count):
    sent = [rollout(Prompt("train:1", [], ""), index) for index in range(count)]
    for each in sent:
        each.policy_versions, each.rollout_log_probs = torch.zeros(0, dtype=torch.int32), torch.rand(2, 3)
    for each, before in zip(there_and_back(sent), sent, strict=True):
        assert (each.policy_versions.shape, each.policy_versions.dtype) == ((0,), torch.int32)
        assert torch.equal(each.rollout_log_probs, before.rollout_log_probs)


def test_fields_of_rows_that_hold_their_default_cost_nothing_and_come_back_with_their_types():
    usual = [Sampling(seed=index) for index in range(2)]
    assert json.loads(encode(usual).header)["columns"].count(None) == 9
    for sent in (
        usual,
        [Sampling()] * 3,
        [Sampling(top_p=1, top_k=False)] * 2,
        [Sampling(0), Sampling(seed=1)],
        [Sampling(stop=("\n",))] * 2,
    ):
        found = there_and_back(sent)
        assert found == sent
        assert [type(each.top_p) for each in found] == [type(each.top_p) for each in sent]
        assert [type(each.top_k) for each in found] == [type(each.top_k) for each in sent]
    alike = [Request("", Prompt("train:1", [], ""), Sampling(stop_token_ids=(3,))) for _ in range(2)]
    assert there_and_back(alike) == alike
    negative = rollout(Prompt("train:1", [], ""), 0)
    negative.reward = -0.0
    assert math.copysign(1, there_and_back([negative])[0].reward) == -1


def test_to_a_receiver_that_has_the_prompts_their_ids_alone_cross():
    prompt = Prompt("train:1", [5, 9], "2+2=", {"answer": "4"})
    for value in ([rollout(prompt, 0), rollout(prompt, 1)], [prompt, prompt], {"one": prompt}):
        encoded = encode(value, prompts=False)
        assert b"2+2=" not in encoded.header
        assert b"train:1" in encoded.header
    first, second = decode(encode([prompt, prompt], prompts=False).header, bytearray())
    assert first is second
    assert first == Prompt("train:1", [], "")


def test_prompts_of_several_messages_are_written_once_and_come_back_in_each():
    prompts = [Prompt("train:1", [5, 9], "2+2=", {"answer": "4", "day": datetime.date(2026, 1, 2)})]
    prompts += [Prompt("train:2", [5], "a"), Prompt("train:3", [6], "b", {"picture": b"\x00\x01"})]
    requests = [
        Request(f"0:{n}:{m}", prompt, Sampling(), n, m) for m in (0, 1) for n, prompt in enumerate(prompts)
    ]
    texts = {}
    for sent in (requests[:2], requests[3:5], requests[:1], requests, requests[1:2] * 2):
        encoded = encode({"requests": sent}, texts=texts)
        found = decode(encoded.header, bytearray(b"".join(encoded.buffers)))["requests"]
        assert found == sent
        for each, other in zip(found, sent, strict=True):
            same = [one.prompt is each.prompt for one in found]
            assert same == [one.prompt is other.prompt for one in sent]
    assert list(texts) == [id(prompt) for prompt in prompts]
    assert texts[id(prompts[0])].count(b"2+2=") == 1
    prompts[1].text = "another, which a receiver has not seen"
    assert b"another" not in b"".join(encode(requests[1:2], texts=texts).buffers)  # it is not written again
    assert encode(requests[:1], prompts=False, texts=texts).buffers == []


class Mine:
    pass


@pytest.mark.parametrize("value", [Mine(), {"a": [Mine()]}, {1, 2}, len, Mine, torch.zeros(2).to_sparse()])
def test_what_is_not_in_the_set_is_refused_before_it_is_sent(value):
    with pytest.raises((TypeError, NotImplementedError, RuntimeError)):
        encode(value)


def test_a_refusal_names_the_place():
    with pytest.raises(TypeError, match=r"value\.plain\.a\[1\] is a .*Mine, which does not cross between"):
        encode({"plain": {"a": [0, Mine()]}})


HOSTILE = [
    {"$": "os.system", "fields": {"command": "true"}},
    {"$": "Batch", "fields": {"no": 1}},
    {"$": "Batch"},
    {"$": "tensor", "dtype": "float32", "shape": [4], "at": 0},  # 16 bytes of 8
    {"$": "tensor", "dtype": "float32", "shape": [-1], "at": 0},
    {"$": "tensor", "dtype": "float32", "shape": [1 << 61, 1 << 61], "at": 0},
    {"$": "tensor", "dtype": "object", "shape": [1], "at": 0},
    {"$": "tensor", "dtype": "float32", "shape": [1], "at": -4},
    {"$": "bytes", "at": 0, "size": 9},
    {"$": "same", "prompt": 0},
    {"$": "date", "text": "no"},
    {"$": ["list"]},
    {"$": "dict", "items": [[[], 1]]},
    {"$": "rows", "of": "os.system", "columns": [["true"]]},
    {"$": "rows", "of": "Layout", "columns": [[0], [1], [True]]},
    {"$": "rows", "of": "Prompt", "columns": [["a"], [[1]], ["b"]]},
    {"$": "rows", "of": "Prompt", "columns": [["a"], [[1]], ["b"], [{}, {}]]},
    {"$": "rows", "of": "Prompt", "columns": [["a"], [[1]], "b", [{}]]},
    {"$": "rows", "of": "Prompt", "columns": [{"$": "empty", "kind": "list"}] * 4},
    {"$": "rows", "of": "Prompt", "columns": [["a"], [[1]], ["b"], {"$": "empty", "kind": "set"}]},
    {"$": "rows", "of": "Prompt", "columns": [None] * 4},
    {"$": "rows", "of": "Prompt", "columns": [["a"], [[1]], None, None]},  # a text has no default
    {"$": "rows", "of": "Sampling", "columns": [None] * 10},  # of how many rows?
    {
        "$": "rows",
        "of": "Prompt",
        "columns": [["a", "b"], {"$": "cat", "dtype": "int8", "sizes": [8, 1], "at": 0}] * 2,
    },
    {
        "$": "rows",
        "of": "Prompt",
        "columns": [["a", "b"], {"$": "cat", "dtype": "int8", "sizes": [9, -1], "at": 0}] * 2,
    },
    {"$": "rows", "of": "Prompt", "columns": [["a"], {"$": "each", "value": 3}, ["b"], [{}]]},
    {"$": "prompts", "new": None, "at": [0]},
    {
        "$": "rows",
        "of": "Prompt",
        "columns": [{"$": "prompts", "new": None, "at": [True]}, [[1]], ["b"], [{}]],
    },
    {"$": "prompts", "new": {"$": "rows", "of": "Prompt", "columns": []}, "at": []},
    {"$": "prompts", "new": {"$": "ids", "of": "abc"}, "at": [0]},
    {"$": "prompts", "new": {"$": "ids", "of": [{"$": "x"}, 5]}, "at": [0]},
    {"$": "prompts", "new": {"$": "texts", "of": [[0, 9]]}, "at": [0]},  # 9 bytes of 8
    {"$": "prompts", "new": {"$": "texts", "of": [[0, 8]]}, "at": [0]},  # no JSON
    {"$": "columns", "count": 3, "of": [["x", "float32", 0]]},
    {"$": "columns", "count": -1, "of": [["x", "int8", 0]]},
    {"$": "columns", "count": 1, "of": [["x", "object", 0]]},
]


@pytest.mark.parametrize("tree", HOSTILE, ids=lambda tree: json.dumps(tree)[:40])
def test_bytes_of_somebody_else_make_nothing(tree):
    with pytest.raises(DecodeError):
        decode(json.dumps(tree).encode(), bytearray(8))


@pytest.mark.parametrize("header", [b"", b"\xff", b"{", b"[" * 100_000])
def test_a_header_that_is_no_json_is_refused(header):
    with pytest.raises(DecodeError):
        decode(header, bytearray())


def test_only_the_vocabulary_crosses():
    assert set(CLASSES) == {
        *("Batch", "LossCall", "Prompt", "Request", "Rollout", "Sampling", "StepOutput", "TrainOutput"),
        *("Layout", "SyncResult"),
    }


@pytest.mark.parametrize(
    "value", [[1, 2, 3], [], [1.5, None, "a", True], [1, [2, 3]], [[1], {"a": [1, (2,)]}]]
)
def test_lists_of_plain_values_come_as_they_went(value):
    encoded = encode(value)
    found = decode(encoded.header, bytearray())
    assert found == value
    assert [type(entry) for entry in found] == [type(entry) for entry in value]


def test_a_list_of_plain_values_and_one_that_does_not_cross_is_refused_with_its_place():
    with pytest.raises(TypeError, match=r"value\[2\]"):
        encode([1, 2, object()])


@pytest.mark.parametrize(
    "header", [b'{"$": "Path"}', b'{"\\u0024": "Path"}', b'{"a": [{"\\u0024": "Path"}]}']
)
def test_a_class_that_does_not_cross_is_refused_however_its_mark_is_spelt(header):
    with pytest.raises(DecodeError):
        decode(header, bytearray())


def test_what_holds_plain_values_alone_comes_back_equal():
    for value in (
        {"id": 7, "value": None},
        {"id": 7, "value": [1, "a", [2.5, {"b": True}]]},
        {"id": "back\\slash"},
    ):
        assert there_and_back(value) == value
