"""Forms in which models write tool calls, each a function ``(text, schemas) -> list[ToolCall]``.

``text`` is a sampled turn with special tokens, except those at its end. ``schemas`` holds the JSON schemas of the
parameters by tool name. A call that cannot be read is returned with its ``problem``, and the others of the turn are
read all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from json import JSONDecoder, loads
from typing import Any

from engine_plugin_agents.calls import ToolCall, types_of

Schemas = Mapping[str, Mapping[str, Any]]

SEPARATORS = re.compile(r"[\s,;\[\]]*")  # between the calls of a list
NAMED = re.compile(r'[\s\[]*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
FENCE = re.compile(r"```(?:json|tool_call)?[ \t]*\n")
MISTRAL_CALL = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]([^\[]*))?(?:\[ARGS\])?")
HERMES_BEGIN = re.compile("<tool_call>|</think>")
HARMONY_END = re.compile(r"<\|(?:start|end|call|return)\|>")
HARMONY_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>"  # before the first call
DEEPSEEK_FENCED = re.compile(r"([^\n]*)\n```json\n(.*?)\n?```\s*", re.DOTALL)
PYTHON_NAMES = {"True": True, "False": False, "None": None}  # as templates write them
NO_OBJECT = (ToolCall("", problem='the call must be an object with "name" and "arguments"'),)
NO_SEPARATOR = (ToolCall("", problem="the call must have <｜tool▁sep｜> between its name and its arguments"),)
_decode = JSONDecoder().raw_decode


class _Tags:
    """A form in which each argument has tags.

    Args:
        begin: matches the beginning of a call with its name, the beginning of one that cannot be read, or ``</think>``.
        argument: matches a key and the beginning of its value.
        value_end: matches the end of a value; one within the value is none.
        end: matches the end of a call.
        problem: how a call must be.
    """

    def __init__(self, begin: str, argument: str, value_end: str, end: str, problem: str) -> None:
        self.begin, self.end, self.problem = re.compile(begin), re.compile(end), problem
        self.value_end = re.compile(value_end)
        self.argument = re.compile(rf"\s*{argument}(.*?){value_end}", re.DOTALL)


QWEN = _Tags(
    r"</think>|(?:<tool_call>\s*)?<function=([^>\n]{0,200})>|<tool_call>",
    r"<parameter=([^>\n]+)>\n?",
    r"\n?</parameter>(?=\s*(?:<parameter=|</function>|\Z))",
    r"\s*</function>",
    "the call must be <function=NAME><parameter=KEY>VALUE</parameter></function>",
)
GLM = _Tags(
    r"</think>|<tool_call>\s*([^<{\n]{0,200})",
    r"<arg_key>([^<\n]+)</arg_key>\s*<arg_value>",
    r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>|\Z))",
    r"\s*</tool_call>",
    "the call must be <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
)


def hermes(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5 and Qwen3."""
    calls, at = list[ToolCall](), 0
    while found := HERMES_BEGIN.search(text, at):
        at = found.end()
        if found[0] == "</think>":
            calls = []  # calls in thoughts are no calls
            continue
        read, at = _objects(text, at, found.start())
        closed = at == len(text) or text.startswith("</tool_call>", at)
        calls += read if read and (closed or read[-1].problem) else NO_OBJECT
    return calls


def qwen3_coder(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5."""
    return _tagged(text, schemas, QWEN)


def glm(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``: GLM-4.5 to 4.7."""
    return _tagged(text, schemas, GLM)


def deepseek_v3(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read calls of DeepSeek: V3 and R1 with a type, the name and a fenced block, V3.1 with the name and JSON."""
    calls = list[ToolCall]()
    for begin, part in _parts(text, "<｜tool▁call▁begin｜>"):
        begin -= len(DEEPSEEK_CALLS) * text.endswith(DEEPSEEK_CALLS, 0, begin)
        written, closed, rest = part.partition("<｜tool▁call▁end｜>")
        name, separator, arguments = written.partition("<｜tool▁sep｜>")
        if fenced := DEEPSEEK_FENCED.fullmatch(arguments):
            name, arguments = fenced.groups()
        calls += (_with_arguments(name.strip(), arguments, begin=begin),) if separator else NO_SEPARATOR
        if "</think>" in (rest if closed or not calls[-1].problem else part):
            calls = []  # calls in thoughts are no calls
    return calls


def llama3(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read ``{"name": ..., "parameters": {...}}``, perhaps after ``<|python_tag|>``: Llama 3.1 to 3.3."""
    before, tag, called = text.partition("<|python_tag|>")
    return [*(_objects(called, begin=len(before))[0] or NO_OBJECT)] if tag else json(text, schemas)


def gpt_oss(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``: gpt-oss (Harmony)."""
    return [_with_arguments(to[1], body) for _, to, body in _harmony(text) if to]


def harmony_content(text: str) -> str:
    """Return what a turn of gpt-oss says to the user: its messages without a recipient, outside of ``analysis``."""
    bodies = [body for header, to, body in _harmony(text) if not to and "analysis" not in header]
    return "\n\n".join(bodies)


def _harmony(text: str) -> Iterator[tuple[str, re.Match[str] | None, str]]:
    """Yield the header of each message of a turn of gpt-oss, its recipient, and its body."""
    for message in HARMONY_END.split(text):
        header, found, body = message.partition("<|message|>")
        if found:
            yield header, HARMONY_TO.search(header), body


def mistral(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]NAME[ARGS]{...}`` of newer models."""
    calls = []
    for begin, part in _parts(text, "[TOOL_CALLS]"):
        if named := MISTRAL_CALL.match(part):
            calls.append(_with_arguments(named[1], part[named.end() :], named[2] or "", begin))
        else:
            calls += _objects(part, begin=begin)[0] or NO_OBJECT
    return calls


def json(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read ``{"name": ..., "arguments": {...}}`` at the beginning of a turn or of a fenced block."""
    thought, _, said = text.partition("</think>")
    calls, at = list[ToolCall](), 0 if NAMED.match(thought) or not said else len(text) - len(said)
    fences = ((fence.start(), fence.end()) for fence in FENCE.finditer(text, at))
    for begin, start in ((at, at), *fences):
        if start >= at and NAMED.match(text, start):
            read, at = _objects(text, start, begin)
            # an answer in JSON, such as {"name": "Ann", "age": 3}, is no call
            calls += [call for call in read if call.problem or call.arguments or call.name in schemas]
    return calls


def _tagged(text: str, schemas: Schemas, tags: _Tags) -> list[ToolCall]:
    """Return the calls whose arguments have tags."""
    calls, at = list[ToolCall](), 0
    # a search for the end of a value that has none, for each such value, would take quadratic time
    last = max((end.end() for end in tags.value_end.finditer(text)), default=0)
    while found := tags.begin.search(text, at):
        name, at, arguments = (found[1] or "").strip(), found.end(), dict[str, Any]()
        if found[0] == "</think>":
            calls = []  # calls in thoughts are no calls
            continue
        while at < last and (argument := tags.argument.match(text, at)):
            at = argument.end()
            arguments[argument[1]] = _typed(argument[2], types_of(schemas.get(name, {}), argument[1]))
        closed = name and tags.end.match(text, at)
        calls.append(ToolCall(name, arguments, "" if closed else tags.problem, begin=found.start()))
    return calls


def _parts(text: str, mark: str) -> Iterator[tuple[int, str]]:
    """Yield the position of each mark in a text, and the text from it to the next mark."""
    at = text.find(mark)
    while at >= 0:
        after = text.find(mark, at + len(mark))
        yield at, text[at + len(mark) : after if after >= 0 else None]
        at = after


def _objects(text: str, at: int = 0, begin: int = 0) -> tuple[list[ToolCall], int]:
    """Return the calls in the JSON objects at a position, alone or in a list, and the position of what follows them.

    Args:
        text: the text.
        at: the position.
        begin: the position at which the calls begin, with a mark before them.
    """
    calls = list[ToolCall]()
    while text.startswith("{", at := SEPARATORS.match(text, at).end()):  # type: ignore[union-attr]
        try:
            value, at = _decode(text, at)
        except (ValueError, RecursionError) as error:
            return [*calls, ToolCall("", problem=_not_json(error))], at
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
        calls += (_call(name, arguments, value.get("id"), begin),) if isinstance(name, str) else NO_OBJECT
    return calls, at


def _with_arguments(name: str, text: str, id: str = "", begin: int = 0) -> ToolCall:
    """Return the call of a name that precedes its arguments."""
    try:
        return _call(name, loads(text), id, begin)
    except (ValueError, RecursionError) as error:
        return ToolCall(name, problem=_not_json(error))


def _call(name: str, arguments: Any, id: Any, begin: int) -> ToolCall:
    problem = "" if isinstance(arguments, dict) else '"arguments" must be an object'
    return ToolCall(name, {} if problem else arguments, problem, id if isinstance(id, str) else "", begin)


def _not_json(error: Exception) -> str:
    return f"the call is not JSON ({getattr(error, 'msg', error)})"


def _typed(value: str, types: set[str]) -> Any:
    """Return a value of one of these JSON types; unchanged if it may be a text, or is of none of them."""
    if not types or "string" in types:
        return value
    try:
        return loads(value)
    except (ValueError, RecursionError):
        return PYTHON_NAMES.get(value.strip(), value)
