"""What the kit takes for a right cut by top-k and top-p: rounding is excused, one token too many or too few is not."""

import math
from types import SimpleNamespace

import pytest
import torch

from engine_core.specs import RolloutBackend
from engine_core.types import Sampling
from engine_plugin_testing.contracts import close
from engine_plugin_testing.rollout_bench import RolloutBench, expected_log_probs
from engine_plugin_testing.rollout_cuts import CUTTING, EDGE, TIED, cuts


def logits(*probs):
    """Of tokens 0, 1, ... with these probabilities; the rest is one more token, the least likely."""
    rest = 1 - sum(probs)
    assert rest >= -1e-9
    return torch.tensor([*probs, rest] if rest > 1e-9 else probs, dtype=torch.float64).log()


def kept(values, **sampling):
    return [sorted(cut.keeps()) for cut in cuts(values, Sampling(**sampling))]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_p": 0.7}, [0, 1]),
        ({"top_p": 0.81}, [0, 1, 2]),
        ({"top_p": 0.1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 2, "top_p": 0.6}, [0]),  # 0.5 of the 0.8 that top-k left are 0.625
        ({"top_k": 9}, [0, 1, 2, 3]),
    ],
)
def test_away_from_a_border_one_cut_is_right(sampling, expected):
    assert kept(logits(0.5, 0.3, 0.15), **sampling) == [expected]


def test_a_cut_tells_log_probs_of_what_it_left_and_its_mass():
    (cut,) = cuts(logits(0.5, 0.3, 0.15), Sampling(top_p=0.7))
    assert cut.log_probs[:2].tolist() == pytest.approx([math.log(0.625), math.log(0.375)])
    assert cut.log_probs[2:].tolist() == [-math.inf, -math.inf]
    assert cut.log_mass == pytest.approx(math.log(0.8))


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.7, [[0, 1], [0, 1, 2]]),  # the sum of two is 0.7 but for rounding
        (0.7 - 0.9 * EDGE, [[0, 1], [0, 1, 2]]),
        (0.7 + 0.9 * EDGE, [[0, 1, 2], [0, 1]]),
        (0.7 - 1.1 * EDGE, [[0, 1]]),
        (0.7 + 1.1 * EDGE, [[0, 1, 2]]),
    ],
)
def test_where_the_sum_comes_within_rounding_of_top_p_one_token_may_go_either_way(top_p, expected):
    assert kept(logits(0.4, 0.3, 0.2), top_p=top_p) == expected


def test_tokens_equal_but_for_rounding_may_be_kept_or_cut_together():
    tied = logits(0.5, 0.2, 0.2 * (1 - 0.5 * TIED), 0.06)
    assert kept(tied, top_p=0.6) == [[0, 1], [0, 2], [0, 1, 2], [0]]
    apart = logits(0.5, 0.2, 0.2 * (1 - 2 * EDGE), 0.06)
    assert kept(apart, top_p=0.6) == [[0, 1]]


def test_a_tie_away_from_the_border_excuses_nothing():
    assert kept(logits(0.3, 0.3, 0.15, 0.15), top_p=0.7) == [[0, 1, 2], [0, 1, 3], [0, 1, 2, 3], [0, 1]]
    assert kept(logits(0.3, 0.3, 0.2, 0.15), top_p=0.7) == [[0, 1, 2]]


def test_of_two_tokens_equally_likely_top_k_may_take_either():
    assert kept(logits(0.5, 0.2, 0.2, 0.06), top_k=2) == [[0, 1], [0, 2]]
    assert kept(logits(0.5, 0.2, 0.19, 0.06), top_k=2) == [[0, 1]]


SEARCHED = (0.01061907, 0.01058142, 0.01058131, 0.01051342)
"""Of the kit's own model: the border of top-p 0.7 lies between the second and the third, which 18 halvings do not separate."""


@pytest.mark.parametrize(
    ("tokens", "right"),
    [
        (29, False),  # two fewer
        (30, True),  # both of the tied ones cut
        (31, True),  # exact
        (32, True),  # both kept
        (33, False),  # and one more
    ],
)
def test_a_search_for_a_threshold_is_excused_for_a_tie_and_for_no_other_token(tokens, right):
    probs = [0.68085656 / 29] * 29 + list(SEARCHED)
    values = logits(*probs, *[0.005] * 55)
    mass = sum(probs[:tokens])
    rollout = SimpleNamespace(
        token_ids=torch.tensor([3, 0]), prompt_length=1, rollout_log_probs=torch.tensor([0.0, math.log(probs[0] / mass)])
    )  # fmt: skip
    expected, _ = expected_log_probs(
        lambda input_ids, position_ids: values[None, None].expand(1, 2, -1), rollout, Sampling(top_p=0.7)
    )
    if right:
        close(rollout.rollout_log_probs[1:], expected, 1e-3, "log-prob")
    else:
        with pytest.raises(AssertionError, match="off by more than"):
            close(rollout.rollout_log_probs[1:], expected, 1e-3, "log-prob")


def test_a_sampler_is_tried_with_the_options_that_its_spec_declares(monkeypatch):
    spec = RolloutBackend(load=print, sampling=frozenset({"temperature", "top_p"}))
    monkeypatch.setattr(RolloutBench, "load_plugins", lambda bench: SimpleNamespace(spec=lambda *name: spec))
    bench = RolloutBench({"backend": "mine"}, SimpleNamespace(folder=None))
    assert bench.supported(*CUTTING, {"temperature": 0.0, "seed": 9}) == [
        {"top_p": 0.7},
        {"temperature": 0.0, "seed": 9},
    ]
