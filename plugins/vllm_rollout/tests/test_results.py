"""Rollouts of what vLLM sampled, put together with what was sampled before."""

import pytest
import torch
from engine_plugin_vllm_rollout.results import end_at_border

from engine_core.types import Prompt, Rollout

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
