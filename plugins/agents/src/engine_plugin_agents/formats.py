"""Forms in which models write tool calls, each a function ``(text, schemas) -> list[ToolCall]``.

``text`` is a sampled turn with special tokens, except those at its end. ``schemas`` holds the JSON schemas of the
parameters by tool name. A call that cannot be read is returned with its ``problem``, and the others of the turn are
read all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from json import JSONDecoder, loads
from typing import Any

from engine_plugin_agents.calls import ToolCall, types_of

Schemas = Mapping[str, Mapping[str, Any]]

SEPARATORS = re.compile(r"[\s,;\[\]]*")  # between the calls of a list
NAMED = re.compile(r'[\s\[]*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
FENCE = re.compile(r"```(?:json|tool_call)?[ \t]*\n")
MISTRAL_CALL = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]([^\[]*))?(?:\[ARGS\])?")
VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>|\Z))")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)" + VALUE_END.pattern, re.DOTALL)
HERMES_BEGIN = re.compile("<tool_call>|</think>")
QWEN_BEGIN = re.compile(r"</think>|(?:<tool_call>\s*)?<function=([^>\n]{0,200})>|<tool_call>")
QWEN_END = re.compile(r"\s*</function>")
PYTHON_NAMES = {"True": True, "False": False, "None": None}  # as templates write them
NO_OBJECT = (ToolCall("", problem='the call must be an object with "name" and "arguments"'),)
NO_FUNCTION = "the call must be <function=NAME><parameter=KEY>VALUE</parameter></function>"
_decode = JSONDecoder().raw_decode


def hermes(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5 and Qwen3."""
    calls, at = list[ToolCall](), 0
    while found := HERMES_BEGIN.search(text, at):
        at = found.end()
        if found[0] == "</think>":
            calls = []  # calls in thoughts are no calls
            continue
        read, at = _objects(text, at)
        closed = at == len(text) or text.startswith("</tool_call>", at)
        calls += read if read and (closed or read[-1].problem) else NO_OBJECT
    return calls


def qwen3_coder(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5."""
    calls, at = list[ToolCall](), 0
    # a search for the end of a parameter that has none, for each such parameter, would take quadratic time
    last = max((end.end() for end in VALUE_END.finditer(text)), default=0)
    while found := QWEN_BEGIN.search(text, at):
        name, at, arguments = found[1] or "", found.end(), dict[str, Any]()
        if found[0] == "</think>":
            calls = []
            continue
        while at < last and (parameter := PARAMETER.match(text, at)):
            at = parameter.end()
            arguments[parameter[1]] = _typed(parameter[2], types_of(schemas.get(name, {}), parameter[1]))
        closed = name and QWEN_END.match(text, at)
        calls.append(ToolCall(name, arguments, problem="" if closed else NO_FUNCTION))
    return calls


def llama3(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read ``{"name": ..., "parameters": {...}}``, perhaps after ``<|python_tag|>``: Llama 3.1 to 3.3."""
    _, tag, called = text.partition("<|python_tag|>")
    return [*(_objects(called)[0] or NO_OBJECT)] if tag else json(text, schemas)


def gpt_oss(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``: gpt-oss (Harmony)."""
    calls = []
    for message in re.split(r"<\|(?:start|end|call|return)\|>", text):
        header, body, arguments = message.partition("<|message|>")
        to = re.search(r"\bto=(?:functions\.)?([^\s<]+)", header)
        if body and to:
            calls.append(_with_arguments(to[1], arguments))
    return calls


def mistral(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]NAME[ARGS]{...}`` of newer models."""
    calls = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        if named := MISTRAL_CALL.match(part):
            calls.append(_with_arguments(named[1], part[named.end() :], named[2] or ""))
        else:
            calls += _objects(part)[0] or NO_OBJECT
    return calls


def json(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read ``{"name": ..., "arguments": {...}}`` at the beginning of a turn or of a fenced block."""
    thought, _, said = text.partition("</think>")
    text = text if NAMED.match(thought) else said or text
    calls, at = list[ToolCall](), 0
    for start in (0, *(fence.end() for fence in FENCE.finditer(text))):
        if start >= at and NAMED.match(text, start):
            read, at = _objects(text, start)
            # an answer in JSON, such as {"name": "Ann", "age": 3}, is no call
            calls += [call for call in read if call.problem or call.arguments or call.name in schemas]
    return calls


def _objects(text: str, at: int = 0) -> tuple[list[ToolCall], int]:
    """Return the calls in the JSON objects at a position, alone or in a list, and the position of what follows them."""
    calls = list[ToolCall]()
    while text.startswith("{", at := SEPARATORS.match(text, at).end()):  # type: ignore[union-attr]
        try:
            value, at = _decode(text, at)
        except (ValueError, RecursionError) as error:
            return [*calls, ToolCall("", problem=_not_json(error))], at
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
        calls += (_call(name, arguments, value.get("id")),) if isinstance(name, str) else NO_OBJECT
    return calls, at


def _with_arguments(name: str, text: str, id: str = "") -> ToolCall:
    """Return the call of a name that precedes its arguments."""
    try:
        return _call(name, loads(text), id)
    except (ValueError, RecursionError) as error:
        return ToolCall(name, problem=_not_json(error))


def _call(name: str, arguments: Any, id: Any) -> ToolCall:
    problem = "" if isinstance(arguments, dict) else '"arguments" must be an object'
    return ToolCall(name, {} if problem else arguments, problem, id if isinstance(id, str) else "")


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
