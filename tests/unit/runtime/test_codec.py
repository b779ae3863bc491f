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

from engine_core.runtime.codec import CLASSES, DTYPES, NotOurs, decode, encode
from engine_core.types import Batch, LossCall, Prompt, Request, Rollout, Sampling

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
]


@pytest.mark.parametrize("tree", HOSTILE, ids=lambda tree: json.dumps(tree)[:40])
def test_bytes_of_somebody_else_make_nothing(tree):
    with pytest.raises(NotOurs):
        decode(json.dumps(tree).encode(), bytearray(8))


@pytest.mark.parametrize("header", [b"", b"\xff", b"{", b"[" * 100_000])
def test_a_header_that_is_no_json_is_refused(header):
    with pytest.raises(NotOurs):
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
