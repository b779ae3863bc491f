"""What is noted of the likeliest token follows requests through the rows of a batch; the mass that follows from it."""

import math
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

from engine_plugin_vllm_rollout.log_mass import KEY, LogMass, log_mass


def added(row, key, sampled):
    params = SimpleNamespace(extra_args={KEY: key} if key else None)
    return (row, params, [1], sampled)


def update(removed=(), added=(), moved=()):
    return BatchUpdate(batch_size=3, removed=removed, added=added, moved=moved)


def likeliest(row):
    """Log-prob of the largest logit, in float64."""
    values = row.double()
    return float(values.max() - values.logsumexp(-1))


def test_each_request_is_noted_by_its_own_row_and_position():
    noted, tokens = LogMass(None, torch.device("cpu"), False), {"a": [], "b": [], "c": []}
    torch.manual_seed(0)
    steps = [torch.randn(3, 7) * 3 for _ in range(4)]
    noted.update_state(
        update(added=[added(0, "a", tokens["a"]), added(1, None, []), added(2, "b", tokens["b"])])
    )
    for count in (0, 1):  # each sampled one token after the first step
        assert noted.apply(steps[count]) is steps[count]
        tokens["a"].append(5)
        tokens["b"].append(6)
    # a leaves, b takes its row, c comes; a swap with the row that is not noted
    moved = [(2, 0, MoveDirectionality.UNIDIRECTIONAL), (1, 0, MoveDirectionality.SWAP)]
    noted.update_state(update(removed=[0], added=[added(2, "b", tokens["b"])], moved=moved))
    noted.update_state(update(added=[added(2, "c", tokens["c"])]))
    noted.apply(steps[2])  # a part of the prompt of c: nothing was sampled
    tokens["b"].append(7)
    noted.update_state(None)
    noted.apply(steps[3])
    found = noted.take(["a", "b", "c", "nobody"])
    expected = {
        "a": [likeliest(steps[0][0]), likeliest(steps[1][0])],
        "b": [likeliest(steps[0][2]), likeliest(steps[1][2]), likeliest(steps[2][1]), likeliest(steps[3][1])],
        "c": [likeliest(steps[3][2])],
        "nobody": [],
    }
    assert {key: pytest.approx(values, abs=1e-6) for key, values in expected.items()} == found
    assert noted.take(["b"]) == {"b": []}


def test_the_mass_is_what_the_cut_kept():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    kept = probs[:2] / probs[:2].sum()
    returned = [[math.log(kept[1]), math.log(kept[0])], [math.log(kept[0])]]
    found = log_mass([math.log(0.5)] * 3, returned)
    assert found == pytest.approx([math.log(0.8)] * 2)
    with pytest.raises(RuntimeError, match="noted 1 of 2 tokens"):
        log_mass([0.0], returned)
