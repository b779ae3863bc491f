"""Rollouts of what vLLM sampled, put together with what was sampled before."""

import math

import pytest
import torch
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput

from engine_core.errors import TrainingFailed
from engine_core.types import Prompt, Request, Rollout, Sampling
from engine_plugin_vllm_rollout.results import Running, end_at_border, rollout_of

PROMPT = [ord(c) for c in "Q:"]


def answered(text):
    ids = PROMPT + [ord(c) for c in text]
    count = torch.arange(len(ids))
    return Rollout(
        "r", Prompt("p", PROMPT, "Q:"), torch.tensor(ids), count >= 2, -count.float(), count.int(), "length"
    )


def decode(ids):
    return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("before", "now", "stop", "kept"),
    [
        ("ab</e", "nd>cdef", ("</end>",), "ab</end>"),  # on the border
        ("ab</en", "d>", ("</end>",), "ab</end>"),  # with the last token
        ("ab", "xend>", ("</end>",), None),  # only its end is there
        ("ab", "cd", ("ab",), "abc"),  # a stop in what was there before is seen with the next token
        ("a", "bcdefg", ("no", "cde"), "abcde"),
    ],
)
def test_a_stop_string_on_the_border_ends_the_response(before, now, stop, kept):
    rollout = answered(before + now)
    rollout.extras = {"x": torch.arange(len(rollout.token_ids))}
    end_at_border(rollout, len(PROMPT) + len(before), stop, decode)
    assert decode(rollout.token_ids.tolist()) == "Q:" + (kept if kept is not None else before + now)
    assert rollout.finish_reason == ("stop" if kept is not None else "length")
    length = len(rollout.token_ids)
    for column in (
        rollout.loss_mask,
        rollout.rollout_log_probs,
        rollout.policy_versions,
        rollout.extras["x"],
    ):
        assert len(column) == length


def finished(values, beside=0, log_probs=True):
    """What vLLM says of as many tokens: log-probs of each, and of some others at each position."""
    flat = FlatLogprobs()
    for token, value in enumerate(values):
        others = [value - 1 - n for n in range(beside)]
        flat.append_fast(
            [token, *range(50, 50 + beside)], [value, *others], iter(range(1 + beside)), [None] * (1 + beside)
        )
    asked = Request("r", Prompt("p", PROMPT, "Q:"), Sampling(log_probs=log_probs))
    output = CompletionOutput(
        0, "", list(range(len(values))), None, flat if log_probs else None, finish_reason="length"
    )
    return rollout_of(Running(asked, "r-0"), output, 3, decode)


@pytest.mark.parametrize("beside", [0, 2])
def test_each_token_has_its_own_log_prob_whatever_is_told_beside_it(beside):
    rollout = finished([-0.5, -1.25, -2.0], beside)
    assert rollout.token_ids.tolist() == [*PROMPT, 0, 1, 2]
    assert rollout.token_ids.dtype == torch.int64
    assert rollout.rollout_log_probs.tolist() == [0.0, 0.0, -0.5, -1.25, -2.0]
    assert rollout.rollout_log_probs.dtype == torch.float32
    assert rollout.loss_mask.tolist() == [False, False, True, True, True]
    assert rollout.policy_versions.tolist() == [0, 0, 3, 3, 3]


def test_without_log_probs_there_are_zeros_and_nothing_sampled_is_an_empty_response():
    assert finished([-1.0, -2.0], log_probs=False).rollout_log_probs.tolist() == [0.0] * 4
    assert finished([]).rollout_log_probs.tolist() == [0.0] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_no_number_ends_the_run(value):
    with pytest.raises(TrainingFailed, match=r"'r', policy version 3.*diverged"):
        finished([-1.0, value])
