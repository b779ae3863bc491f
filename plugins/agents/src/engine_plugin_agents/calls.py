"""Tool calls: read out of sampled text, and run with a time limit.

Text is decoded for reading only. A call that cannot be read or fails becomes a text for the policy, which
may learn from it; it is no failure of the episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

MESSAGE_CHARACTERS = 300


def find_tag(text: str, tag: str) -> str | None:
    """What stands between the first ``<tag>`` and ``</tag>``, without white space around it; None: there is no such pair."""
    found = re.search(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[1].strip() if found else None


@dataclass(frozen=True)
class ToolCall:
    """``ToolCall("search", {"query": "tides"})``; with a ``problem`` it could not be read."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def json_calls(text: str, tag: str = "tool_call") -> list[ToolCall]:
    """All ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` of a text, the form of Hermes and Qwen.

    One that is no such object is there too, with what is wrong with it. A tag that is never closed runs to
    the end of the text.
    """
    pattern = rf"<{re.escape(tag)}>(.*?)(?:</{re.escape(tag)}>|\Z)"
    return [_read(inner) for inner in re.findall(pattern, text, re.DOTALL)]


def _read(text: str) -> ToolCall:
    try:
        made = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", problem=f"the call is not JSON ({error})")
    if not isinstance(made, dict) or not isinstance(made.get("name"), str):
        return ToolCall("", problem='the call must be an object with "name" and "arguments"')
    arguments = made.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(made["name"], problem='"arguments" must be an object')
    return ToolCall(made["name"], arguments)


def told(error: BaseException) -> str:
    """An error as the policy is told it."""
    return f"error: {type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]


async def limited(call: Callable[[], Any], seconds: float, threads: set[threading.Thread]) -> Any:
    """The result of a call, of a coroutine function or a blocking one, which runs in a thread of its own.

    Args:
        call: without arguments.
        seconds: after them a coroutine is cancelled and a thread is left to itself; neither is waited for.
        threads: where a thread is entered while it runs.

    Raises:
        TimeoutError: no answer in time.
        Exception: what the call raised.
    """
    future: asyncio.Future[Any]
    future = asyncio.ensure_future(contained(call)) if _is_async(call) else _in_thread(call, threads)
    try:
        done, _ = await asyncio.wait({future}, timeout=seconds)
        if not done:
            raise TimeoutError(f"no answer after {seconds:g} s")
        return future.result()
    finally:
        future.cancel()


async def contained(call: Callable[[], Awaitable[Any]]) -> Any:
    """Its result; an exit becomes an error, because it would end the loop and every episode with it."""
    try:
        return await call()
    except (SystemExit, KeyboardInterrupt) as exit:
        raise RuntimeError(f"{type(exit).__name__}: {exit}") from exit


def _is_async(call: Any) -> bool:
    plain = inspect.unwrap(getattr(call, "func", call))  # of a partial
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(
        getattr(plain, "__call__", None)  # noqa: B004
    )


def _in_thread(call: Callable[[], Any], threads: set[threading.Thread]) -> asyncio.Future[Any]:
    """Not the loop's executor: it has few threads, and its end waits for all of them.

    consumes: one call; waits for: the tool; unblocked by: its result, or never; produces: the result, in the loop.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        threads.discard(thread)
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except StopIteration as stop:  # a future refuses it
            error = RuntimeError(f"StopIteration: {stop.value}")
        except Exception as raised:
            error = raised
        except BaseException as raised:  # SystemExit: of the tool, not of the run
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=work, daemon=True, name="engine-tool")
    threads.add(thread)
    thread.start()
    return future
