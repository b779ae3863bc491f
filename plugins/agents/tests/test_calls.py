"""Tool calls out of text, good and broken."""

import pytest

from engine_plugin_agents import ToolCall, find_tag, json_calls


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


def test_a_tags_name_is_no_pattern():
    assert find_tag("<a>1</a>", ".") is None


def test_all_calls_of_a_text_are_read():
    text = 'I look.<tool_call>\n{"name": "search", "arguments": {"q": "tides"}}\n</tool_call> and <tool_call>{"name": "now"}</tool_call>'
    assert json_calls(text) == [ToolCall("search", {"q": "tides"}), ToolCall("now", {})]
    assert json_calls("no call") == []


@pytest.mark.parametrize(
    ("inner", "problem"),
    [
        ("{'name': 1}", "the call is not JSON"),
        ('{"name": "a"', "the call is not JSON"),
        ("[" * 100_000, "the call is not JSON"),
        ("[1]", 'an object with "name"'),
        ('{"arguments": {}}', 'an object with "name"'),
        ('{"name": 3}', 'an object with "name"'),
        ('{"name": "a", "arguments": [1]}', '"arguments" must be an object'),
    ],
)
def test_a_broken_call_says_what_is_wrong(inner, problem):
    (call,) = json_calls(f"<tool_call>{inner}</tool_call>")
    assert problem in call.problem


def test_a_call_that_is_never_closed_runs_to_the_end():
    assert json_calls('<tool_call>{"name": "a"}') == [ToolCall("a", {})]
    (cut,) = json_calls('<tool_call>{"name": "a", "argum')
    assert cut.problem == "the call has no </tool_call>: the response was cut off, or the tag is missing"
