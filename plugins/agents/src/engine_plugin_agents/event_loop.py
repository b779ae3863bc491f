"""The asyncio loop of episodes, in a dedicated thread.

Another thread drives the sampler (``session``). So the loop continues while a batch is sampled, and sampling does not
count against the tools' time limits.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

CLOSE_SECONDS = 1.0


class LoopThread:
    """An asyncio loop in a daemon thread, which ends with the process even if a task blocks it.

    consumes: posted functions, episodes; waits for: sampled turns, tools, timers; unblocked by: ``post``, tools that
    answer, the clock; produces: requests for turns, ended episodes.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine-episodes")
        self._thread.start()
        self._asked: float | None = None  # when the pending probe of the loop was posted

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def post(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Schedule a function call on the loop, from any thread."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def silent_seconds(self) -> float:
        """Return how long the loop has not run a posted probe; the first call posts the probe, so call repeatedly."""
        asked = self._asked
        if asked is None:
            asked = self._asked = time.monotonic()
            self.post(self._came_round)
        return time.monotonic() - asked

    def _came_round(self) -> None:
        self._asked = None

    def where(self) -> str:
        """Return the line of code that the loop's thread executes."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "its end"
        at = traceback.extract_stack(frame)[-1]
        return f"{at.filename}:{at.lineno} in {at.name}: {at.line}"

    def close(self) -> None:
        """Cancel the loop's tasks and stop it; tasks that resist cancellation are abandoned."""
        asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        self._thread.join(timeout=CLOSE_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS / 2)
        self.loop.stop()
