"""Tool calls: parsed from sampled text, and run with a time limit.

Text is decoded for parsing only. A call that cannot be parsed or fails becomes a text for the policy, which may learn
from it. It does not make the episode fail.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

MESSAGE_CHARACTERS = 300


def find_tag(text: str, tag: str) -> str | None:
    """Return the text between the first ``<tag>`` and the next ``</tag>``, stripped; None without such a pair."""
    found = re.search(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[1].strip() if found else None


@dataclass(frozen=True)
class ToolCall:
    """A tool call, e.g. ``ToolCall("search", {"query": "tides"})``; a ``problem`` says why it could not be parsed."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def json_calls(text: str, tag: str = "tool_call") -> list[ToolCall]:
    """Return all calls ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` of a text: Hermes and Qwen's form.

    A call that cannot be parsed is returned with its ``problem``. An unclosed tag extends to the end of the text.
    """
    pattern = rf"<{re.escape(tag)}>(.*?)(</{re.escape(tag)}>|\Z)"
    return [_read(inner, tag, closed=bool(end)) for inner, end in re.findall(pattern, text, re.DOTALL)]


def _read(text: str, tag: str, closed: bool) -> ToolCall:
    try:
        made = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not closed:
            return ToolCall(
                "", problem=f"the call has no </{tag}>: the response was cut off, or the tag is missing"
            )
        return ToolCall("", problem=f"the call is not JSON ({error})")
    if not isinstance(made, dict) or not isinstance(made.get("name"), str):
        return ToolCall("", problem='the call must be an object with "name" and "arguments"')
    arguments = made.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(made["name"], problem='"arguments" must be an object')
    return ToolCall(made["name"], arguments)


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
    future = asyncio.ensure_future(contained(call)) if _is_async(call) else _in_thread(call)
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


def _in_thread(call: Callable[[], Any]) -> asyncio.Future[Any]:
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
