"""The process of a world: ``python worlds KIND OPTIONS``, in the interpreter that has the world's library.

It answers calls, one JSON object a line: ``{"id", "call", "arguments"}`` on stdin, ``{"id", "value"}`` or ``{"id",
"error"}`` on stdout. ``{"id", "cancel"}`` cancels a call. It imports the standard library and ``KIND_world`` alone.

consumes: calls, any number at once; waits for: the world; unblocked by: answers, cancellation; produces: answers.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import traceback
from typing import Any

READY = -1  # id of the answer that the world is made
LINE_BYTES = 16 * 2**20


async def main() -> None:
    """Serve until stdin ends."""
    output = os.dup(1)
    os.dup2(2, 1)  # what the world prints is no answer
    messages = os.fdopen(os.dup(0))  # of all episodes, not for the world's children
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    world = importlib.import_module(f"{sys.argv[1]}_world").World(**json.loads(sys.argv[2]))
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), messages)
    tasks: dict[int, asyncio.Task[None]] = {}

    def write(answer: dict[str, Any]) -> None:
        """Write an answer."""
        data = json.dumps(answer, default=str).encode() + b"\n"
        while data:
            data = data[os.write(output, data) :]

    async def answer(message: dict[str, Any]) -> None:
        """Make a call and write its result."""
        try:
            value = getattr(world, message["call"])(**message["arguments"])
            found = {"value": await value if inspect.isawaitable(value) else value}
        except (Exception, SystemExit) as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            found = {"error": f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})"}
        finally:
            tasks.pop(message["id"], None)
        write({"id": message["id"], **found})

    write({"id": READY, "value": None})
    while line := await reader.readline():
        message = json.loads(line)
        if "cancel" not in message:
            tasks[message["id"]] = asyncio.ensure_future(answer(message))
        elif message["id"] in tasks:
            tasks.pop(message["id"]).cancel()  # one that has not begun does not remove itself


if __name__ == "__main__":
    asyncio.run(main())
