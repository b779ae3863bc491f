"""Values and texts are compared as data; a form that a program makes up is no value."""

import json
import math

import pytest

from engine_plugin_rewards.code_cases import Assertions, Call, Expression, Stdin
from engine_plugin_rewards.code_verdicts import same_text, verdict
from engine_plugin_rewards.sandbox.box import Ended
from engine_plugin_rewards.sandbox.inside.python_tests import encode


def ended(value=None, code=0, values=None, output=b"", late=False, flooded=False):
    values = json.dumps({"value": encode(value)}).encode() if values is None else values
    return Ended(code, late, flooded, output, b"", values)


SAME = [
    (1, 1),
    (True, 1),
    (1.0, 1),
    (0.1 + 0.2, 0.3),
    (math.inf, math.inf),
    (math.nan, math.nan),
    (2**100, 2**100),
    ("a", "a"),
    (None, None),
    ((1, [2]), [1, (2,)]),
    ({1, 2}, frozenset({2, 1})),
    ({0.1 + 0.2, 1.0, 5}, {0.3, 1, 5.0}),
    ({(1, "a"), None}, {None, (1, "a")}),
    ({1: [2]}, {"1": (2,)}),
    (b"a", b"a"),
    (1 + 2j, 1 + 2j),
]
DIFFERENT = [
    (1, 2),
    (2**100, 2**100 + 1),
    (2**100, 1e400),
    (1, "1"),
    (None, 0),
    ([], None),
    ([1], [1, 2]),
    ([1, 2], [2, 1]),
    ([1], {1}),
    ({1: 2}, {1: 3}),
    ({1: 2}, {1: 2, 3: 4}),
    (b"a", "a"),
    (b"a", b"b"),
    (0.1, 0.2),
    ({0.1, 0.2}, {0.1, 0.3}),
    ({0.1}, {0.1, 0.2}),
    ({1, "a"}, {1, "b"}),
    (math.nan, 0.0),
]


@pytest.mark.parametrize(("got", "expected"), SAME)
def test_equal_values(got, expected):
    assert verdict(Call("f", [], expected), ended(got), 1e-9) == "passed"
    assert verdict(Expression("e", expected=expected), ended(got), 1e-9) == "passed"


@pytest.mark.parametrize(("got", "expected"), DIFFERENT)
def test_other_values(got, expected):
    assert verdict(Call("f", [], expected), ended(got), 1e-9) == "wrong"


def test_further_values_count_as_the_expected_one():
    assert verdict(Call("f", [], [5], also=("a", 5)), ended(5), 0) == "passed"
    assert verdict(Call("f", [], [5], also=("a", 5)), ended([5]), 0) == "passed"
    assert verdict(Call("f", [], [5], also=("a", 5)), ended(6), 0) == "wrong"
    assert verdict(Call("f", [], [5]), ended(5), 0) == "wrong"


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"{}",
        b"null",
        b"[1]",
        b"\xff",
        b'{"value": 3',
        b"[" * 100_000,
        b'{"value": ' + b"[" * 100_000,
        b'{"value": ["int", "zz"]}',
        b'{"value": ["int", 3]}',
        b'{"value": ["list", 3]}',
        b'{"value": ["dict", [3, [4]]]}',
        b'{"value": [[], []]}',
        b'{"value": ["passed", true]}',
        b'{"value": {"value": 3}}',
        b'{"value": ["set", [[]]]}',
        b'{"value": ["set", [{}, 3]]}',
        b'{"nonce": 3, "value": ["dict", [[[], 4]]]}',
        b'{"nonce": "", "value": []}',
        b'{"value": 1e999}',
        b'{"value": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize(
    "case",
    [
        Call("f", [], 3),
        Call("f", [], [3]),
        Call("f", [], {3: 4}),
        Expression("e", expected={3}),
        Assertions("t"),
    ],
)
def test_what_is_no_value_is_wrong(told, case):
    assert verdict(case, ended(values=told), 1e-6, nonce="n") == "wrong"


def test_the_end_of_assertions_is_told_by_their_nonce_and_a_clean_exit():
    case = Assertions("t")

    assert verdict(case, ended(values=b'{"nonce": "abc"}'), 0, nonce="abc") == "passed"
    assert verdict(case, ended(values=b'{"nonce": "abd"}'), 0, nonce="abc") == "wrong"
    assert verdict(case, ended(values=b'{"nonce": "abc"}', code=1), 0, nonce="abc") == "error"


@pytest.mark.parametrize(
    ("value", "truth"),
    [
        (True, True),
        (0, False),
        ("", False),
        ([], False),
        ([0], True),
        (2**80, True),
        (math.nan, True),
        ({}, False),
    ],
)
def test_truth_is_that_of_the_data(value, truth):
    assert verdict(Expression("e", truth=truth), ended(value), 0) == "passed"
    assert verdict(Expression("e", truth=not truth), ended(value), 0) == "wrong"


def test_how_a_program_ended_comes_first():
    case = Stdin("", "a")

    assert verdict(case, ended(output=b"a"), 0) == "passed"
    assert verdict(case, ended(output=b"a", code=3), 0) == "error"
    assert verdict(case, ended(output=b"a", code=-11), 0) == "crashed"
    assert verdict(case, ended(output=b"a", late=True), 0) == "timeout"
    assert verdict(case, ended(output=b"a", flooded=True), 0) == "too much output"


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n", "1  2", True),
        ("1\n2\n\n", "1\n2", True),
        ("1\n\n2", "1\n2", False),
        ("a\r\nb", "a\nb", True),
        ("0.3333333", "0.33333331", True),
        ("3.0", "3", False),
        ("0.34", "0.33", False),
        ("nan", "0.5", False),
        ("9" * 5000, "0.5", False),
        ("", "", True),
        ("yes", "no", False),
    ],
)
def test_printed_text(printed, expected, same):
    assert same_text(printed, expected, 1e-6) is same
