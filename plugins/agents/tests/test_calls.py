"""Tags of a text, arguments of calls, and answers of tools."""

import time

import pytest

from engine_plugin_agents import ToolCall, find_tag
from engine_plugin_agents.calls import as_answer, misfit


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so <calc> 12*7 </calc>", "12*7"),
        ("<calc>1</calc><calc>2</calc>", "1"),
        ("<calc>1\n+2</calc>", "1\n+2"),
        ("<calc></calc>", ""),
        ("<calc>1", None),
        ("1</calc>", None),
        ("<CALC>1</CALC>", None),
        ("", None),
    ],
)
def test_a_tag_is_read_when_it_is_whole(text, found):
    assert find_tag(text, "calc") == found


def test_a_tag_that_is_opened_often_and_never_closed_is_found_absent_in_time():
    start = time.monotonic()
    assert find_tag("<calc>" * 50_000, "calc") is None
    assert time.monotonic() - start < 5


def test_a_tags_name_is_no_pattern():
    assert find_tag("<a>1</a>", ".") is None


PARAMETERS = {
    "required": ["a"],
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "string", "nullable": True},
        "c": {"anyOf": [{"type": "number"}, {"type": "array"}]},
        "d": {"type": "boolean"},
        "e": {"description": "anything"},
    },
}


def tool(a, b="", c=0, d=False, e=None, **more):
    """Take what the parameters name, and more."""


@pytest.mark.parametrize(
    "arguments",
    [{"a": 1, "c": 1}, {"a": 1, "b": None, "c": 1.5, "d": True, "e": {}}, {"a": 1, "c": [], "unnamed": 3}],
)
def test_arguments_of_the_schemas_types_fit(arguments):
    assert misfit(ToolCall("f", arguments), tool, PARAMETERS) == ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "f: missing the argument 'a'"),
        ({"a": "1"}, "f: 'a' must be of type integer, got string"),
        ({"a": True}, "f: 'a' must be of type integer, got boolean"),
        ({"a": 1, "b": 2}, "f: 'b' must be of type null or string, got integer"),
        ({"a": 1, "c": "x" * 100}, "f: 'c' must be of type array or number, got string"),
        ({"a": 1, "d": 0}, "f: 'd' must be of type boolean, got integer"),
    ],
)
def test_arguments_of_other_types_do_not_fit(arguments, problem):
    assert misfit(ToolCall("f", arguments), tool, PARAMETERS) == problem


def test_without_a_schema_the_signature_decides():
    assert misfit(ToolCall("f", {"a": "1"}), tool, {}) == ""
    assert misfit(ToolCall("f", {"b": "1"}), tool, {}) == "f: missing a required argument: 'a'"
    assert misfit(ToolCall("max", {"b": "1"}), max, {}) == ""  # a function in C without a signature


@pytest.mark.parametrize(
    "schema", [{"required": 3, "properties": 3}, {"properties": {"a": 3}}, {"properties": {"a": {"type": 3}}}]
)
def test_a_schema_of_another_form_checks_nothing(schema):
    assert misfit(ToolCall("f", {"a": 1}), tool, schema) == ""


def test_the_middle_of_a_long_answer_is_left_out():
    assert as_answer("abcdef", 6) == "abcdef"
    assert as_answer("abcdefgh", 4) == "ab\n[4 characters are left out]\ngh"
    assert as_answer("abcdefg", 3) == "a\n[5 characters are left out]\ng"


def test_an_answer_can_be_encoded():
    assert as_answer("\ud800\x00é", 10) == "??é"
