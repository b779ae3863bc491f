"""The asyncio loop of episodes, in a dedicated thread, and its messages to the controller.

The controller's main thread samples (``runner``), because it handles signals and a worker group may be called from one
thread only. The loop therefore has a separate thread and continues while a batch is sampled, so that sampling does not
count against the tools' time limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from engine_core.errors import EngineError
from engine_plugin_agents import calls
from engine_plugin_agents.checks import Play, check_rollout
from engine_plugin_agents.policy import LimitReached

if TYPE_CHECKING:
    from engine_core.types import Request, Rollout
    from engine_plugin_agents.episode import Episode

TRACE_CHARACTERS = 3000
CLOSE_SECONDS = 1.0
NOTHING_SAMPLED = (
    "the episode is over and the policy was never asked, so there is nothing to learn from. Call "
    "'await episode.sample(...)' at least once"
)


class LoopThread:
    """An asyncio loop in a daemon thread, which ends with the process even if a task blocks it.

    consumes: posted functions, episodes; waits for: sampled turns, tools, timers; unblocked by: ``post``, tools that
    answer, the clock; produces: requests for turns, finished episodes, for the main thread.
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


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one episode."""

    number: int
    rollout: Rollout  # of a failed episode, the part that exists
    failure: str = ""  # "", "error", "timeout"
    message: str = ""
    trace: str = ""
    limited: bool = False  # ended because no turn or token was left


@dataclass(slots=True)
class News:
    """The loop's messages since the previous call of ``Session.news``."""

    requests: list[Request] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # ids of requests whose episode no longer waits
    finished: list[Finished] = field(default_factory=list)
    broken: list[Exception] = field(default_factory=list)  # errors that end the run


class Session:
    """The episodes of one call of ``EnvironmentRunner.run``, on the loop.

    Args:
        play: the environment's function.
        label: the names of the environment and its plugin, for messages.
        rewards: names of the rewards that the environment declares.
        max_concurrent: maximum number of concurrent episodes; 0: all.
    """

    def __init__(self, play: Play, label: str, rewards: frozenset[str], max_concurrent: int) -> None:
        self.play, self.label, self.rewards, self.max_concurrent = play, label, rewards, max_concurrent
        self.started = 0
        self.counts: Counter[str] = Counter()
        self._news: SimpleQueue[Callable[[News], None]] = SimpleQueue()
        self._fresh: list[Request] = []
        self._futures: dict[str, asyncio.Future[Rollout]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    # in the main thread

    def news(self, seconds: float) -> News:
        """Return all pending messages; wait up to ``seconds`` for the first."""
        news = News()
        with contextlib.suppress(Empty):
            self._news.get(timeout=seconds)(news) if seconds else self._news.get_nowait()(news)
            while True:
                self._news.get_nowait()(news)
        return news

    # in the loop's thread

    def begin(self, episodes: Sequence[Episode]) -> None:
        """Start the episodes."""
        slots = asyncio.Semaphore(self.max_concurrent or len(episodes))
        self._tasks = [
            asyncio.ensure_future(self._run(number, episode, slots))
            for number, episode in enumerate(episodes)
        ]

    def answer(self, rollouts: Sequence[Rollout]) -> None:
        """Deliver sampled turns to the episodes that wait for them."""
        for rollout in rollouts:
            future = self._futures.get(rollout.request_id)
            if future is not None and not future.done():
                future.set_result(rollout)

    def cancel(self) -> None:
        """Cancel all episodes without waiting for their ends."""
        for task in self._tasks:
            task.cancel()

    async def ask(self, request: Request) -> Rollout:
        """Send a request and return its rollout; requests of one iteration of the loop are sent together."""
        future = self._futures[request.id] = asyncio.get_running_loop().create_future()
        if not self._fresh:
            asyncio.get_running_loop().call_soon(self._flush)
        self._fresh.append(request)
        try:
            return await future
        finally:
            del self._futures[request.id]
            if future.cancelled():
                self._news.put(lambda news: news.dropped.append(request.id))

    def _flush(self) -> None:
        fresh, self._fresh = self._fresh, []
        self._news.put(lambda news: news.requests.extend(fresh))

    async def _run(self, number: int, episode: Episode, slots: asyncio.Semaphore) -> None:
        async with slots:
            self.started += 1
            seconds = episode.policy.limits.episode_seconds
            task = asyncio.ensure_future(calls.contained(partial(self.play, episode)))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # not "never retrieved"
            try:
                await asyncio.wait({task}, timeout=seconds)
            finally:
                in_time = task.done()
                task.cancel()  # a task that resists cancellation is abandoned
                episode.policy.close()
            try:
                finished = self._ending(number, episode, task, in_time)
            except Exception as error:  # an engine error; the environment's errors are in its task
                broken = error
                self._news.put(lambda news: news.broken.append(broken))
                return
            self.counts.update(episode.counts)
            self._news.put(lambda news: news.finished.append(finished))

    def _ending(self, number: int, episode: Episode, task: asyncio.Task[Any], in_time: bool) -> Finished:
        if not in_time:
            seconds = episode.policy.limits.episode_seconds
            return Finished(number, episode.rollout(), "timeout", f"not over after {seconds:g} s")
        if task.cancelled():
            return Finished(number, episode.rollout(), "error", "the episode cancelled itself")
        error = task.exception()
        if error is None:
            made = check_rollout(self.label, task.result(), episode)
            if episode.policy.turns:
                return Finished(number, made)
            if len(episode.prompt.token_ids) < episode.policy.limits.tokens:
                return Finished(number, made, "error", NOTHING_SAMPLED)
        if error is None or isinstance(error, LimitReached):
            return Finished(number, self._truncated(episode), limited=True)
        if isinstance(error, EngineError):
            raise error
        frame = error.__traceback__
        while frame and frame.tb_next and frame.tb_frame.f_code.co_filename == calls.__file__:
            frame = frame.tb_next  # skip to the environment's first frame
        trace = "".join(traceback.format_exception(type(error), error, frame))[-TRACE_CHARACTERS:]
        message = f"{type(error).__name__}: {error}"[:500].rstrip(".")
        return Finished(number, episode.rollout(), "error", message, trace)

    def _truncated(self, episode: Episode) -> Rollout:
        made = episode.rollout(dict.fromkeys(self.rewards, 0.0))
        made.finish_reason = "length"
        return made
