"""Conversion of a row of any known layout to a `Row`: text to render, text to learn, and the other columns.

======== =========================================== =========================================
layout   columns                                     origin
======== =========================================== =========================================
prompt   prompt (text or messages), response, answer the default
trl      prompt (text or messages), completion       TRL's prompt-completion and prompt-only
verl     prompt (messages), reward_model.ground_truth verl; the ground truth becomes ``answer``
messages messages                                    conversations with role and content
sharegpt conversations                               conversations with from and value
======== =========================================== =========================================

For sampling, a conversation ends before its last assistant turn, which becomes the column ``response``.
For supervised learning, the whole conversation is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from engine_core.config.models import ColumnsConfig
from engine_core.data.rows import BadRow
from engine_core.errors import did_you_mean

Message = dict[str, Any]

SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(slots=True)
class Row:
    """A row: ``Row("2+2=", columns={"answer": "4"})`` or ``Row([{"role": "user", "content": "2+2="}])``."""

    prompt: str | list[Message]
    response: str | list[Message] | None = None  # learned after `prompt`; None: learn the turns of `prompt`
    columns: dict[str, Any] = field(default_factory=dict)


def detect(row: Mapping[str, Any], columns: ColumnsConfig) -> str:
    """Return the layout of ``row`` by the names of its columns; raises `BadRow` if no layout fits."""
    if "reward_model" in row and columns.prompt in row:
        return "verl"
    for name, layout in ((columns.messages, "messages"), ("conversations", "sharegpt")):
        if row.get(name) is not None:
            turn = row[name][0] if isinstance(row[name], list) and row[name] else None
            return "sharegpt" if isinstance(turn, dict) and "from" in turn else layout
    if columns.prompt in row:
        return "trl" if "completion" in row else "prompt"
    raise BadRow(
        f"no column '{columns.prompt}' ([data.columns] prompt), '{columns.messages}' (messages) "
        f"or 'conversations'.{did_you_mean(columns.prompt, row)}"
    )


def convert(row: Mapping[str, Any], layout: str, columns: ColumnsConfig, learn: bool) -> Row:
    """Read ``row`` as ``layout``, for supervised learning (``learn``, which needs a response) or for sampling.

    Raises:
        BadRow: a column is missing or of the wrong type.
    """
    if layout in ("messages", "sharegpt"):
        name = "conversations" if layout == "sharegpt" and columns.messages not in row else columns.messages
        turns = _messages(column(row, name, "messages"), name)
        if layout == "sharegpt" and isinstance(row.get("system"), str):
            turns = with_system(turns, row["system"])
        result = Row(turns) if learn else _before_the_answer(turns)
    else:
        name = columns.prompt
        result = Row(text_or_messages(column(row, name, "prompt"), name, layout == "verl"))
        if learn:
            response = columns.response
            if layout == "trl" and response == ColumnsConfig().response:
                response = "completion"
            result.response = text_or_messages(column(row, response, "response"), response)
    renamed = name == columns.prompt != ColumnsConfig().prompt  # as "prompt" rewards receive the rendered one
    result.columns |= {key: _plain(value) for key, value in row.items() if renamed or key != name}
    if tools := tools_of(row, columns):
        result.columns["tools"] = tools
    if columns.answer in row:
        result.columns["answer"] = _plain(row[columns.answer])
    elif layout == "verl":
        result.columns["answer"] = _plain(_ground_truth(row["reward_model"]))
    elif columns.answer != ColumnsConfig().answer:  # a resolved config names the default too
        column(row, columns.answer, "answer")
    return result


def tools_of(row: Mapping[str, Any], columns: ColumnsConfig) -> list[dict[str, Any]]:
    """Return the JSON schemas of a row's tools; raises `BadRow` if the column holds anything else."""
    value = row.get(columns.tools) or []
    if isinstance(value, str):  # CSV has no lists
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise BadRow(f"column '{columns.tools}' must be a list of JSON schemas, got {shown(value)}")
    return [_present(_plain(tool)) for tool in value]


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """Return ``messages`` with ``system`` in front, unless they begin with a system message."""
    if system is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _before_the_answer(messages: list[Message]) -> Row:
    if messages[-1]["role"] != "assistant":
        return Row(messages)
    if len(messages) == 1:
        raise BadRow("the conversation has no turn before the assistant's")
    return Row(messages[:-1], columns={"response": messages[-1].get("content")})


def _ground_truth(model: Any) -> Any:
    if not isinstance(model, Mapping) or "ground_truth" not in model:
        raise BadRow(f"column 'reward_model' must hold a ground_truth, got {shown(model)}")
    return model["ground_truth"]


def column(row: Mapping[str, Any], name: str, key: str) -> Any:
    """Return a column of ``row``; ``key`` is the key of ``[data.columns]`` that names it.

    Raises:
        BadRow: the column is missing.
    """
    if name not in row:
        raise BadRow(f"no column '{name}' ([data.columns] {key}).{did_you_mean(name, row)}")
    return row[name]


def text_or_messages(value: Any, name: str, only_messages: bool = False) -> str | list[Message]:
    """Return the value of a column as text or messages.

    Raises:
        BadRow: the value is neither.
    """
    if isinstance(value, str) and not only_messages:
        return value
    return _messages(value, name, "text or a list of messages")


def _messages(value: Any, name: str, expected: str = "a list of messages") -> list[Message]:
    if isinstance(value, str):  # CSV has no lists
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"column '{name}' must be {expected}, got text that is no JSON") from error
    if not isinstance(value, list) or not value:
        raise BadRow(f"column '{name}' must be {expected}, got {shown(value)}")
    return [_message(turn, f"{name}[{i}]") for i, turn in enumerate(value)]


def _message(turn: Any, name: str) -> Message:
    if isinstance(turn, dict) and "from" in turn:
        role = turn["from"]
        known = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        turn = {"role": known, "content": turn.get("value")}
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise BadRow(f"{name} must be a message with role and content, got {shown(turn)}")
    content = turn.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text")) for part in content)
    if not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
        raise BadRow(f"{name}: content must be text, got {shown(content)}")
    return {**_present(_plain(turn)), "content": content or ""}


def _present(value: Any) -> Any:
    """Return ``value`` without keys whose value is None.

    In Parquet, each message, tool and mapping of arguments has all keys that occur in the column.
    """
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return ``value`` as text, numbers, lists and dicts, which JSON can hold."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def shown(value: Any) -> str:
    """Return the beginning of a value and its type, for error messages."""
    text = repr(value)
    return f"{text[:40]}{'...' if len(text) > 40 else ''} ({type(value).__name__})"
