"""Tool calls in the forms of published models, good and broken: a broken one is returned with its problem."""

import random

import pytest

from engine_plugin_agents import ToolCall, formats
from engine_plugin_agents.plugin import FORMATS

SEARCH, NOW = ToolCall("search", {"q": "tides"}), ToolCall("now")
SCHEMAS = {
    "search": {"properties": {"q": {"type": "string"}}},
    "now": {},
    "f": {
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer"},
            "n": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "b": {"type": "boolean"},
            "l": {"type": ["array", "object"]},
        }
    },
}


def hermes(*bodies):
    return "".join(f"<tool_call>\n{body}\n</tool_call>\n" for body in bodies)


def coder(name, **values):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def zhipu(name, **values):
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()
    )
    return f"<tool_call>{name}\n{inner}</tool_call>"


def deepseek(name, body, v3=True):
    call = f"function<｜tool▁sep｜>{name}\n```json\n{body}\n```" if v3 else f"{name}<｜tool▁sep｜>{body}"
    return f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"


def harmony(name, body, head="<|channel|>commentary to=functions.{} <|constrain|>json"):
    return head.format(name) + f"<|message|>{body}"


Q = '{"name": "search", "arguments": {"q": "tides"}}'
P = '{"name": "search", "parameters": {"q": "tides"}}'
N = '{"name": "now", "arguments": {}}'
GOOD = {
    "hermes": [
        ("I look." + hermes(Q) + " and " + hermes(N), [SEARCH, NOW]),
        (f"<tool_call>{Q}", [SEARCH]),  # cut after the call
        ("<tool_call>" + Q.replace("tides", "</tool_call>"), [ToolCall("search", {"q": "</tool_call>"})]),
        ("<think>" + hermes(N) + "no</think>" + hermes(Q), [SEARCH]),
    ],
    "qwen3_coder": [
        (coder("search", q="tides") + coder("now"), [SEARCH, NOW]),
        ("<function=now></function>", [NOW]),
        (coder("now") + "\n</think>\n\n" + coder("search", q="tides"), [SEARCH]),
        (
            coder("f", s="1", i="2", n="null", b="True", l='[1, {"a": "b"}]', other="3"),
            [ToolCall("f", {"s": "1", "i": 2, "n": None, "b": True, "l": [1, {"a": "b"}], "other": "3"})],
        ),
        (coder("f", i="two"), [ToolCall("f", {"i": "two"})]),  # the check of types refuses it
        (coder("f", s="\n a</parameter>\n\n"), [ToolCall("f", {"s": "\n a</parameter>\n\n"})]),
        (coder("unknown", a="1"), [ToolCall("unknown", {"a": "1"})]),
    ],
    "glm": [
        ("I look.\n" + zhipu("search", q="tides") + "\n" + zhipu("now"), [SEARCH, NOW]),
        (
            "<tool_call>search<arg_key>q</arg_key><arg_value>tides</arg_value></tool_call><tool_call>now</tool_call>",
            [SEARCH, NOW],
        ),
        ("<think>" + zhipu("now") + "no</think>" + zhipu("search", q="tides"), [SEARCH]),
        (
            zhipu("f", s="1", i="2", n="null", b="true", l='[1, {"a": "b"}]', other="3"),
            [ToolCall("f", {"s": "1", "i": 2, "n": None, "b": True, "l": [1, {"a": "b"}], "other": "3"})],
        ),
        (zhipu("f", s="a</arg_value>\nb"), [ToolCall("f", {"s": "a</arg_value>\nb"})]),
    ],
    "deepseek_v3": [
        (
            "I look.<｜tool▁calls▁begin｜>"
            + deepseek("search", '{"q": "tides"}')
            + "\n"
            + deepseek("now", "{}")
            + "<｜tool▁calls▁end｜>",
            [SEARCH, NOW],
        ),
        (
            deepseek("search", '{"q": "tides"}', v3=False) + deepseek("now", "{}", v3=False),
            [SEARCH, NOW],
        ),
        (deepseek("search", '{\n"q": "tides"\n}'), [SEARCH]),
        (deepseek("search", '{"q": "```json\\n"}'), [ToolCall("search", {"q": "```json\n"})]),
        ("<think>" + deepseek("now", "{}") + "no</think>" + deepseek("search", '{"q": "tides"}'), [SEARCH]),
        ("<think><｜tool▁call▁begin｜>no</think>" + deepseek("search", '{"q": "tides"}'), [SEARCH]),
        ("<think><｜tool▁call▁begin｜>function</think>No.", []),
        ("no</think>" + deepseek("search", '{"q": "</think>"}'), [ToolCall("search", {"q": "</think>"})]),
        (  # the tokens at the end of a turn are cut
            deepseek("search", '{"q": "</think>"}').removesuffix("<｜tool▁call▁end｜>"),
            [ToolCall("search", {"q": "</think>"})],
        ),
    ],
    "gpt_oss": [
        (harmony("search", '{"q": "tides"}'), [SEARCH]),
        (
            "<|channel|>analysis<|message|>I look: to=functions.now<|end|><|start|>assistant"
            + harmony("search", '{"q": "tides"}'),
            [SEARCH],
        ),
        (harmony("search", '{"q": "tides"}', " to=functions.{}<|channel|>commentary json"), [SEARCH]),
        (harmony("python", "{}", "<|channel|>analysis to={} code"), [ToolCall("python")]),
        ("<|channel|>final<|message|>" + Q, []),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{Q}, {N}]", [SEARCH, NOW]),
        (
            '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefgh1"}]',
            [ToolCall("now", id="abcdefgh1")],
        ),
        ('[TOOL_CALLS]search[ARGS]{"q": "tides"}[TOOL_CALLS]now[ARGS]{}', [SEARCH, NOW]),
        ("[TOOL_CALLS]now[CALL_ID]abcdefgh1[ARGS]{}", [ToolCall("now", id="abcdefgh1")]),
        (Q, []),
    ],
    "llama3": [
        (P, [SEARCH]),
        (f"<|python_tag|>{P}; {N}", [SEARCH, NOW]),
        ('{"type": "function", "name": "search", "parameters": {"q": "tides"}}', [SEARCH]),
    ],
    "json": [
        (Q, [SEARCH]),
        (f"[{P}, {N}]", [SEARCH, NOW]),
        (f"I look.\n```json\n{Q}\n```\nand\n```\n{N}\n```", [SEARCH, NOW]),
        (f"<think>{N}</think>\n{Q}", [SEARCH]),
        ('{"name": "now"}', [NOW]),
        ('{"name": "Ann", "age": 3}', []),
        ('{"answer": 3}', []),
        (f"The call is {Q}", []),
    ],
}
CASES = [(name, *case) for name in FORMATS for case in GOOD[name]]


@pytest.mark.parametrize(("name", "text", "calls"), CASES)
def test_calls_in_a_models_form_are_read(name, text, calls):
    assert getattr(formats, name)(text, SCHEMAS) == calls


BEFORE = {
    "hermes": ["<think>" + hermes(N) + '</think>The row {"name": "Ann"} is wrong.\n', hermes(Q)],
    "qwen3_coder": [
        "<think><tool_call></think>I look.",
        coder("search", q="<tool_call></think>"),
        coder("now"),
    ],
    "glm": ["<think><tool_call>now</think>I look.", zhipu("search", q="</think>"), zhipu("now")],
    "deepseek_v3": [
        "<think><｜tool▁call▁begin｜></think>I look.",
        "<｜tool▁calls▁begin｜>" + deepseek("search", '{"q": "</think>"}'),
        deepseek("now", "{}"),
    ],
    "mistral": ['I look at {"name": "Ann"}.', f"[TOOL_CALLS][{Q}, {N}]"],
    "llama3": ['I look at {"name": "Ann"}.', f"<|python_tag|>{P}; {N}"],
    "json": [f"<think>{N}</think>I look.\n", f"```json\n{Q}\n```"],
}


@pytest.mark.parametrize("name", BEFORE)
def test_a_call_begins_after_the_text_before_it(name):
    before, *calls = BEFORE[name]
    found = getattr(formats, name)(before + "".join(calls), SCHEMAS)
    assert not any(call.problem for call in found)
    assert found[0].begin == len(before)
    if len(calls) == 2:
        assert found[1].begin == len(before + calls[0])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>42", "42"),
        ("<|channel|>analysis<|message|>Hm", ""),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            + harmony("search", '{"q": "1"}'),
            "I look.",
        ),
        (harmony("search", '{"q": "1"}', " to=functions.{}<|channel|>commentary json"), ""),
    ],
)
def test_the_content_of_gpt_oss_is_what_it_says_to_the_user(text, content):
    assert formats.harmony_content(text) == content


@pytest.mark.parametrize("name", FORMATS)
def test_a_text_without_a_call_has_none(name):
    assert getattr(formats, name)("The answer is 3, as {x} and [1].", SCHEMAS) == []


NOT_JSON, NO_OBJECT = "the call is not JSON (", "the call must be an object with"
BROKEN = [
    ("hermes", hermes("{'name': 1}"), NOT_JSON),
    ("hermes", '<tool_call>{"name": "a", "argum', NOT_JSON),
    ("hermes", hermes('{"name": "a", "arguments": ' + "[" * 100_000), NOT_JSON),
    ("hermes", hermes("[1]"), NO_OBJECT),
    ("hermes", hermes(""), NO_OBJECT),
    ("hermes", hermes('{"arguments": {}}'), NO_OBJECT),
    ("hermes", hermes('{"name": 3}'), NO_OBJECT),
    ("hermes", hermes(N + "}"), NO_OBJECT),
    ("hermes", hermes('{"name": "a", "arguments": [1]}'), '"arguments" must be an object'),
    ("hermes", hermes('{"name": "a", "arguments": {"i": ' + "1" * 5000 + "}}"), NOT_JSON),
    ("qwen3_coder", hermes(Q), "the call must be <function=NAME>"),
    (
        "qwen3_coder",
        coder("search", q="tides").replace("</parameter>", ""),
        "the call must be <function=NAME>",
    ),
    ("qwen3_coder", "<tool_call>\n<function=search>\n<parameter=q>\nti", "the call must be <function=NAME>"),
    ("glm", hermes(Q), "the call must be <tool_call>NAME"),
    ("glm", zhipu("search", q="tides").replace("</arg_value>", ""), "the call must be <tool_call>NAME"),
    ("glm", "<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>ti", "the call must be <tool_call>NAME"),
    ("glm", "<tool_call></tool_call>", "the call must be <tool_call>NAME"),
    ("deepseek_v3", deepseek("search", '{"q": tides}'), NOT_JSON),
    ("deepseek_v3", deepseek("search", '{"q": "ti')[:60], NOT_JSON),
    ("deepseek_v3", deepseek("search", "[1]", v3=False), '"arguments" must be an object'),
    ("deepseek_v3", '<｜tool▁call▁begin｜>search{"q": "tides"}', "the call must have <｜tool▁sep｜>"),
    ("gpt_oss", harmony("search", '{"q": "ti'), NOT_JSON),
    ("gpt_oss", harmony("search", "print(1)"), NOT_JSON),
    ("gpt_oss", harmony("search", "[1]"), '"arguments" must be an object'),
    ("mistral", '[TOOL_CALLS][{"name": "search", "argum', NOT_JSON),
    ("mistral", "[TOOL_CALLS]", NO_OBJECT),
    ("mistral", "[TOOL_CALLS]search[ARGS]tides", NOT_JSON),
    ("llama3", '<|python_tag|>search(q="tides")', NO_OBJECT),
    ("llama3", '{"name": "search", "parameters": {"q": ', NOT_JSON),
    ("json", '```json\n{"name": "search", "arguments": {"q": tides}}\n```', NOT_JSON),
]


@pytest.mark.parametrize(("name", "text", "problem"), BROKEN)
def test_a_broken_call_says_what_is_wrong(name, text, problem):
    (call,) = getattr(formats, name)(text, SCHEMAS)
    assert call.problem.startswith(problem)


TWO = {
    "hermes": hermes('{"name": "search", ', Q),
    "qwen3_coder": "<tool_call>\n<function=now>\n" + coder("search", q="tides"),
    "glm": "<tool_call>now\n" + zhipu("search", q="tides"),
    "deepseek_v3": deepseek("now", "{") + deepseek("search", '{"q": "tides"}'),
    "gpt_oss": harmony("search", "{") + "<|call|><|start|>assistant" + harmony("search", '{"q": "tides"}'),
    "mistral": f'[TOOL_CALLS][{{"arguments": {{}}}}, {Q}]',
    "llama3": f'<|python_tag|>{{"parameters": {{}}}}; {P}',
    "json": f'```json\n{{"name": "search", }}\n```\n```json\n{Q}\n```',
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_call_hides_no_other_of_the_turn(name):
    broken, good = getattr(formats, name)(TWO[name], SCHEMAS)
    assert broken.problem
    assert good == SEARCH


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3", "json"])
def test_a_call_before_a_broken_one_of_a_list_is_kept(name):
    before = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}.get(name, "")
    good, broken = getattr(formats, name)(f'{before}[{Q}, {{"name": "search", "arg', SCHEMAS)
    assert good == SEARCH
    assert broken.problem.startswith(NOT_JSON)


@pytest.mark.parametrize("name", FORMATS)
def test_no_text_makes_a_form_fail(name):
    drawn, pieces = random.Random(0), [text for of, text, *_ in [*CASES, *BROKEN] if of == name]
    for _ in range(300):
        one, other = drawn.choice(pieces)[:3000], drawn.choice(pieces)[:3000]
        cut = drawn.randrange(len(one) + 1)
        text = (
            one[:cut]
            + drawn.choice(["", "\x00", "\ud800", "{", "</think>", "\\"])
            + other[drawn.randrange(len(other) + 1) :]
        )
        for call in getattr(formats, name)(text, SCHEMAS):
            assert isinstance(call, ToolCall)
            assert isinstance(call.name, str)
            assert isinstance(call.arguments, dict)
