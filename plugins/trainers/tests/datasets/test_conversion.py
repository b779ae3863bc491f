"""Rows of public data sets become the columns that ``[data]`` reads."""

import pytest

from engine_plugin_trainers.datasets import conversion


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("so $\\boxed{7}$", "7"),
        ("first $\\boxed{1}$, then $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("a set: $\\boxed{\\{1, 2\\}}$", "\\{1, 2\\}"),
        ("an old command: $\\fbox{x}$", "x"),
        ("without braces: $\\boxed 7$, as said", "7"),
        ("an open brace: $\\boxed{7", "7"),
        ("none", "none"),
    ],
)
def test_the_answer_is_the_last_box_of_the_solution(solution, answer):
    assert conversion.last_boxed(solution) == answer


def test_the_answer_of_gsm8k_has_no_separators_and_the_solution_is_the_response():
    row = {"question": "How many?", "answer": "500 + 734 = <<500+734=1234>>1234\n#### 1,234"}
    assert conversion.gsm8k(row) == {"prompt": "How many?", "answer": "1234", "response": row["answer"]}


def test_a_column_that_makes_a_row_a_row_of_another_layout_is_dropped():
    row = {
        "prompt": "1+1?",
        "solution": "2",
        "source_prompt": [],
        "reward_model": {"ground_truth": "2"},
        "ability": "MATH",
    }
    assert conversion.dapo(row) == {"prompt": "1+1?", "answer": "2", "ability": "MATH"}


def test_text_with_turns_becomes_messages():
    text = "\n\nHuman: Hi\n\nthere\n\nAssistant: Hello, Human: no turn.\n\nHuman: Bye\n\nAssistant:"
    assert conversion.turns(text) == [
        {"role": "user", "content": "Hi\n\nthere"},
        {"role": "assistant", "content": "Hello, Human: no turn."},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": ""},
    ]


ASKED = "\n\nHuman: A\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "usable"),
    [
        (f"{ASKED} B", f"{ASKED} C", True),
        (f"{ASKED} B", f"{ASKED} B", False),
        (f"{ASKED} B", ASKED, False),  # an empty response
        (f"{ASKED} B\n\nHuman: D", f"{ASKED} C\n\nHuman: D", False),  # the last turn is the user's
        (f"{ASKED} B{ASKED} C", f"{ASKED} D{ASKED} E", False),  # they differ before the last turn
        (f"{ASKED} B{ASKED} C", f"{ASKED} B", False),
        ("no turn", f"{ASKED} B", False),
    ],
)
def test_a_pair_of_texts_is_usable_if_one_reply_differs(chosen, rejected, usable):
    assert conversion.one_reply_differs({"chosen": chosen, "rejected": rejected}) is usable
