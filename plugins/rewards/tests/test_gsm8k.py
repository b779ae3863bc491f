"""Responses to a GSM8K question, scored as published harnesses score them; the verdicts were worked out by hand.

``strict`` is verl's ``compute_score`` and lm-evaluation-harness's ``strict-match``: the number behind ``#### ``, compared
as text. ``flexible`` is the harness's ``flexible-extract``: the last number, compared as text.
"""

import pytest

from engine_plugin_rewards.numeric import gsm8k, numeric

ANSWER = "They have 600 + 634 = <<600+634=1234>>1234.\n#### 1,234"
RESPONSES = [  # response, strict, flexible
    ("600 + 634 = 1234\n#### 1234", 1, 1),
    ("#### 1,234", 1, 1),
    ("#### 1234 dollars", 1, 1),
    ("#### 1234%", 1, 1),
    ("#### 1234\n\nQuestion:", 1, 1),  # the stop string stays in the response
    ("So the answer is 1234", 0, 1),
    ("It is 1,234.", 0, 1),
    ("####1234", 0, 1),
    ("#### $1234", 0, 1),
    ("#### **1234**", 0, 1),
    (r"so \boxed{1234}", 0, 1),
    ("600 + 634 = 1234 ####", 0, 1),
    ("#### -1234", 0, 0),
    ("#### 12 34", 0, 0),
    ("1234 = 600 + 634", 0, 0),
    (r"\boxed{1234} after 3 steps", 0, 0),
    ("The answer is 1234. I checked it 2 times", 0, 0),
    ("I do not know.", 0, 0),
    ("", 0, 0),
]
DIFFERENT = [  # response, strict of verl, strict of the harness, ours; flexible of the harness, ours
    ("#### 1233. No.\n#### 1234", (1, 0, 1), (1, 1)),  # the harness takes the first
    ("#### 1234.", (0, 1, 1), (1, 1)),
    ("#### 1234.0", (0, 0, 0), (0, 1)),
    ("2468/2", (0, 0, 0), (0, 1)),
]


def flexible(response):
    options = {"tolerance": 1e-6, "relative_tolerance": 0.0, "boxed": "ignore"}
    return numeric(response, ANSWER, **options)["score"]


@pytest.mark.parametrize(("response", "strict", "last"), RESPONSES)
def test_a_response_scores_as_published_harnesses_score_it(response, strict, last):
    assert gsm8k(response, ANSWER)["score"] == strict
    assert flexible(response) == last


@pytest.mark.parametrize(("response", "strict", "last"), DIFFERENT)
def test_the_responses_that_harnesses_score_otherwise_are_known(response, strict, last):
    assert gsm8k(response, ANSWER)["score"] == strict[-1]
    assert flexible(response) == last[-1]


@pytest.mark.parametrize("answer", ["1234", 1234, "1,234", ANSWER])
def test_the_answer_is_a_number_or_a_whole_solution(answer):
    assert gsm8k("#### 1,234", answer) == {"score": 1.0, "pred": "1234"}
    assert gsm8k("#### 1235", answer) == {"score": 0.0, "pred": "1235"}
    assert gsm8k("1234", answer) == {"score": 0.0, "pred": None}


def test_a_row_without_an_answer_is_not_scored():
    assert gsm8k("#### 1", None) is None
