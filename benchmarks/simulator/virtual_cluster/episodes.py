"""Episodes of a simulation: an asyncio loop in virtual time, and an environment whose tools take virtual seconds."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine_plugin_agents.event_loop import LoopThread

if TYPE_CHECKING:
    from engine_plugin_agents.episode import Episode
    from engine_plugin_agents.runner import EnvironmentRunner
    from virtual_cluster.virtual_clock import VirtualClock


async def tools(episode: Episode, turns: int, least: float, most: float, tokens: int) -> Any:
    """Sample ``turns`` turns; between two of them a tool takes ``least`` to ``most`` seconds, by the episode's seed."""
    drawn = random.Random(episode.seed)
    for number in range(turns):
        await episode.sample(max_tokens=tokens)
        if number < turns - 1:
            await episode.call(asyncio.sleep, drawn.uniform(least, most))
    return episode.rollout({"played": 1.0})


class VirtualSelector(selectors.SelectSelector):
    """A selector without files whose waiting takes virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._changed, self._posted = clock.condition(), False

    def posted(self) -> None:
        """End the current or the next wait."""
        with self._changed:
            self._posted = True
            self._changed.notify_all()

    def select(self, timeout: float | None = None) -> list[Any]:
        """Wait in virtual time for a posted function, at most ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._posted, timeout)
            self._posted = False
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._virtual, self._waits = clock, VirtualSelector(clock)
        super().__init__(self._waits)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual.now()

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        """Schedule a call from another thread and end the loop's wait."""
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        self._waits.posted()
        return handle


class VirtualLoopThread(LoopThread):
    """The loop of episodes in a thread that runs in turn."""

    def __init__(self, clock: VirtualClock) -> None:
        self.loop = VirtualLoop(clock)
        self._asked = None
        self._thread = clock.thread(self._run, "episodes")
        self._thread.start()


def in_virtual_time(environment: EnvironmentRunner, clock: VirtualClock) -> EnvironmentRunner:
    """Have an environment run its episodes on a virtual clock; return it."""
    environment.clock, environment.loop = clock, VirtualLoopThread(clock)
    return environment
