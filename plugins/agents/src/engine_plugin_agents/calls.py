"""Tool calls: checked, and run with a time limit.

A call that cannot be read or fails becomes a text for the policy, which may learn from it. It does not make the episode
fail; ``ToolBroken`` does.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

MESSAGE_CHARACTERS = 300
TERMINAL = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\r(?=\n)")
"""Sequences that color text or move a cursor, and the first half of a line's end."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def find_tag(text: str, tag: str) -> str | None:
    """Return the text between the first ``<tag>`` and the next ``</tag>``, stripped; None without such a pair."""
    inside, end, _ = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")
    return inside.strip() if end else None


@dataclass(frozen=True)
class ToolCall:
    """A tool call, e.g. ``ToolCall("search", {"query": "tides"})``."""

    name: str  #: empty if it could not be read
    arguments: dict[str, Any] = field(default_factory=dict)  #: by name
    problem: str = ""  #: why the call could not be read
    id: str = ""  #: as the policy wrote it, if it did
    begin: int = field(default=0, compare=False)  #: position in the text, with a mark before the call


class ToolBroken(Exception):
    """An error of the machine on which a tool runs, which no call causes: the episode fails."""


def misfit(call: ToolCall, tool: Callable[..., Any], schema: Mapping[str, Any]) -> str:
    """Return why a call's arguments do not fit its tool; empty if they fit.

    Args:
        call: a call without ``problem``.
        tool: the function to call; one in C may have no signature.
        schema: the JSON schema of the parameters, of which ``required`` and the types of ``properties`` are checked.
    """
    required = schema.get("required")
    for key in required if isinstance(required, list) else ():
        if key not in call.arguments:
            return f"{call.name}: missing the argument '{key}'"
    for key, value in call.arguments.items():
        types, given = types_of(schema, key), JSON_TYPES.get(type(value), "null")
        if types and not types & {given, "number" if given == "integer" else given}:
            return f"{call.name}: '{key}' must be of type {' or '.join(sorted(types))}, got {given}"
    try:
        inspect.signature(tool).bind(**call.arguments)
    except TypeError as error:
        return f"{call.name}: {error}"
    except ValueError:  # no signature
        pass
    return ""


def types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """Return the JSON types that the schema of a tool's parameters names for one of them; empty if it names none."""
    properties = schema.get("properties")
    types = _types(properties.get(key)) if isinstance(properties, Mapping) else set()
    return types & {*JSON_TYPES.values(), "null"}


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return {schema} if isinstance(schema, str) else set()
    parts = [schema.get("type"), "null" if schema.get("nullable") else None]
    for found in (parts[0], schema.get("anyOf"), schema.get("oneOf")):
        parts += found if isinstance(found, list) else ()
    return set[str]().union(*map(_types, parts))


def as_answer(text: str, most: int) -> str:
    """Return a tool's answer as text that can be encoded, without control characters except tab and line feed.

    The middle of an answer with more than ``most`` characters is left out.
    """
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters are left out]\n{text[len(text) - half :]}"
    text = CONTROL.sub("?", TERMINAL.sub("", text))
    return text.encode("utf-8", "replace").decode()  # a lone surrogate becomes "?"


def error_text(error: BaseException) -> str:
    """Return an error as text for the policy."""
    return f"error: {type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]


async def limited(call: Callable[[], Any], seconds: float) -> Any:
    """Run a coroutine function, or a blocking function in a dedicated thread, with a time limit; return its result.

    Args:
        call: the function, without arguments.
        seconds: the time limit. After it a coroutine is cancelled and a thread is abandoned, without waiting for
            either.

    Raises:
        TimeoutError: no result in time.
        Exception: the error that the call raised.
    """
    future: asyncio.Future[Any]
    future = asyncio.ensure_future(contained(call)) if _is_async(call) else in_thread(call)
    try:
        done, _ = await asyncio.wait({future}, timeout=seconds)
        if not done:
            raise TimeoutError(f"no answer after {seconds:g} s")
        return future.result()
    finally:
        future.cancel()


async def contained(call: Callable[[], Awaitable[Any]]) -> Any:
    """Await a call and return its result.

    Raises:
        RuntimeError: the call raised ``SystemExit`` or ``KeyboardInterrupt``, which would end the loop and all
            episodes.
    """
    try:
        return await call()
    except (SystemExit, KeyboardInterrupt) as exit:
        raise RuntimeError(f"{type(exit).__name__}: {exit}") from exit


def _is_async(call: Any) -> bool:
    plain = inspect.unwrap(getattr(call, "func", call))  # of a partial
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(
        getattr(plain, "__call__", None)  # noqa: B004
    )


def in_thread(call: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run a call in a new daemon thread. The loop's executor has few threads and would wait for all at its end.

    consumes: one call; waits for: the tool; unblocked by: its result, or never; produces: the result, in the loop.
    """
    done: Future[Any] = Future()

    def work() -> None:
        """Run the call in the thread and set its result or error."""
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(call())
        except (StopIteration, SystemExit, KeyboardInterrupt) as exit:  # these must not reach the loop
            done.set_exception(RuntimeError(f"{type(exit).__name__}: {getattr(exit, 'value', exit)}"))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True, name="engine-tool").start()
    return asyncio.wrap_future(done)
