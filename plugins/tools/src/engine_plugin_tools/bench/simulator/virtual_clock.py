"""Virtual time: the threads of a controller take turns, and when none can go on the clock jumps to the next event.

One thread runs at a time, so a simulation gives the same each time, and what the controller computes costs no virtual
time; its real cost is what ``VirtualClock.controller`` counts.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from engine_core.train.clock import Clock

T = TypeVar("T")


class Stopwatch:
    """CPU seconds of this process, all threads, while it runs."""

    def __init__(self) -> None:
        self._sum, self._since, self._running = 0.0, 0.0, False

    @property
    def seconds(self) -> float:
        """So far."""
        return self._sum + (time.process_time() - self._since if self._running else 0.0)

    def switch(self, on: bool) -> bool:
        """Let it run, or stop it; whether it ran before."""
        before = self._running
        if on and not before:
            self._since = time.process_time()
        elif before and not on:
            self._sum += time.process_time() - self._since
        self._running = on
        return before


class Turn:
    """One thread's right to run."""

    def __init__(self) -> None:
        self.given = threading.Semaphore(0)


class StandsStill(RuntimeError):
    """Every thread waits and nothing is to happen: what is simulated has a deadlock."""


class VirtualClock(Clock):
    """See the module. The thread that makes it is the first to have its turn."""

    def __init__(self) -> None:
        self.controller = Stopwatch()
        self._now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ready: deque[Turn] = deque()
        self._first = self._mine = Turn()  # of the thread that began, of the one that runs
        self._error: BaseException | None = None

    def now(self) -> float:
        return self._now

    def condition(self) -> VirtualCondition:
        return VirtualCondition(self)

    def thread(self, work: Callable[[], None], name: str) -> VirtualThread:
        return VirtualThread(self, work, name)

    def at(self, moment: float, happens: Callable[[], None]) -> None:
        """Have something happen at a moment that is not over."""
        heapq.heappush(self._events, (max(moment, self._now), next(self._order), happens))

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass for the calling thread."""
        mine = self.turn()
        self.at(self._now + seconds, lambda: self.wake(mine))
        self.wait()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What happens in it is none of the controller's work."""
        before = self.controller.switch(False)
        try:
            yield
        finally:
            self.controller.switch(before)

    # -- turns, for conditions, threads and futures ---------------------------

    def turn(self) -> Turn:
        """Of the calling thread, which is the one that runs."""
        return self._mine

    def wake(self, turn: Turn) -> None:
        """This thread can go on."""
        self._ready.append(turn)

    def wait(self) -> None:
        """Until somebody wakes the calling thread; meanwhile others have their turns, and time passes."""
        mine = self.turn()
        before = self.controller.switch(False)
        following = self._next()
        if following is not mine:
            following.given.release()
            mine.given.acquire()
            self._mine = mine
        self.controller.switch(before)
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        """The calling thread ends."""
        before = self.controller.switch(False)
        try:
            following = self._next()
        except BaseException as error:
            self._error = error  # raised in the thread that began
            following = self._first
        following.given.release()
        del before  # whoever runs next switches it as it was for it

    def enter(self, turn: Turn) -> None:
        """A new thread, in itself, before anything else."""
        turn.given.acquire()
        self._mine = turn
        self.controller.switch(True)

    def _next(self) -> Turn:
        """Whose turn it is; time passes until somebody can go on."""
        while not self._ready:
            if not self._events:
                raise StandsStill(f"Nothing more happens after {self._now:.6g} s, and every thread waits.")
            self._now, _, happens = heapq.heappop(self._events)
            happens()
        return self._ready.popleft()


class VirtualCondition(threading.Condition):
    """A condition whose waiting takes virtual time.

    Its lock is taken only where a thread waits within it: threads change in ``wait`` alone.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._owner: Turn | None = None
        self._depth = 0
        self._locked_out: deque[Turn] = deque()
        self._asleep: list[list[Any]] = []  # of each waiting thread: its turn, whether it was notified

    def __enter__(self) -> bool:  # in as few steps as one of the machine takes, for they are counted
        mine = self.clock._mine
        while self._owner is not None and self._owner is not mine:
            self._locked_out.append(mine)
            self.clock.wait()
        self._owner = mine
        self._depth += 1
        return True

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._locked_out:
                self.clock.wake(self._locked_out.popleft())

    def wait(self, timeout: float | None = None) -> bool:
        mine, depth = self.clock.turn(), self._depth
        entry = [mine, False]
        self._asleep.append(entry)
        if timeout is not None:
            self.clock.at(self.clock.now() + timeout, lambda: self._late(entry))
        self._depth = 0
        self._release()
        self.clock.wait()
        self.__enter__()
        self._depth = depth
        return bool(entry[1])

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        end = None if timeout is None else self.clock.now() + timeout
        while not (found := predicate()):
            left = None if end is None else end - self.clock.now()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        for entry in self._asleep[:n]:
            entry[1] = True
            self.clock.wake(entry[0])
        del self._asleep[:n]

    def notify_all(self) -> None:
        self.notify(len(self._asleep))

    def _late(self, entry: list[Any]) -> None:
        found = next((at for at, other in enumerate(self._asleep) if other is entry), None)
        if found is not None:
            del self._asleep[found]
            self.clock.wake(entry[0])

    def _release(self) -> None:
        self._owner = None
        if self._locked_out:
            self.clock.wake(self._locked_out.popleft())


class VirtualThread(threading.Thread):
    """A thread that runs when it is its turn."""

    def __init__(self, clock: VirtualClock, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._clock, self._work, self._own = clock, work, Turn()
        self._over = False
        self._waiting: list[Turn] = []

    def start(self) -> None:
        super().start()
        self._clock.wake(self._own)

    def run(self) -> None:
        self._clock.enter(self._own)
        try:
            self._work()
        finally:
            self._over = True
            for turn in self._waiting:
                self._clock.wake(turn)
            self._clock.leave()

    def join(self, timeout: float | None = None) -> None:
        while not self._over:
            self._waiting.append(self._clock.turn())
            self._clock.wait()
        super().join(timeout)
