"""Virtual time: the threads of a controller take turns, and when none can run the clock jumps to the next event.

One thread runs at a time, so a simulation is deterministic, and the controller's computation costs no virtual time;
``VirtualClock.controller`` counts its real cost.
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

from engine_core.timeline import Clock

T = TypeVar("T")


class Stopwatch:
    """A stopwatch of this process's CPU seconds, over all threads."""

    def __init__(self) -> None:
        self._sum, self._since, self._running = 0.0, 0.0, False

    @property
    def seconds(self) -> float:
        """The seconds counted so far."""
        return self._sum + (time.process_time() - self._since if self._running else 0.0)

    def switch(self, on: bool) -> bool:
        """Start or stop the stopwatch; return whether it ran before."""
        before = self._running
        if on and not before:
            self._since = time.process_time()
        elif before and not on:
            self._sum += time.process_time() - self._since
        self._running = on
        return before


class Turn:
    """A thread's right to run."""

    def __init__(self) -> None:
        self.given = threading.Semaphore(0)


class StandsStill(RuntimeError):
    """An error: every thread waits and no event is left, so the simulated run has a deadlock."""


class VirtualClock(Clock):
    """A clock of virtual time. The thread that makes it has the first turn."""

    def __init__(self) -> None:
        self.controller = Stopwatch()
        self._now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ready: deque[Turn] = deque()
        self._first = self._mine = Turn()  # of the first thread, of the running thread
        self._error: BaseException | None = None

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def condition(self) -> VirtualCondition:
        """Return a condition whose waiting takes virtual time."""
        return VirtualCondition(self)

    def thread(self, work: Callable[[], None], name: str) -> VirtualThread:
        """Return a thread that runs in turn."""
        return VirtualThread(self, work, name)

    def at(self, moment: float, happens: Callable[[], None]) -> None:
        """Call ``happens`` at a moment of virtual time; a past moment counts as now."""
        heapq.heappush(self._events, (max(moment, self._now), next(self._order), happens))

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass for the calling thread."""
        mine = self.turn()
        self.at(self._now + seconds, lambda: self.wake(mine))
        self.wait()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Do not count the work of this block as the controller's."""
        before = self.controller.switch(False)
        try:
            yield
        finally:
            self.controller.switch(before)

    # -- turns, for conditions, threads and futures ---------------------------

    def turn(self) -> Turn:
        """Return the turn of the calling thread, which is the running one."""
        return self._mine

    def wake(self, turn: Turn) -> None:
        """Mark a thread as ready to run."""
        self._ready.append(turn)

    def wait(self) -> None:
        """Wait until the calling thread is woken; meanwhile other threads run and virtual time passes.

        Raises:
            StandsStill: every thread waits, and no event is left.
        """
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
        """Give up the turn of the calling thread, which ends."""
        before = self.controller.switch(False)
        try:
            following = self._next()
        except BaseException as error:
            self._error = error  # raised in the first thread
            following = self._first
        following.given.release()
        del before  # the next thread restores its own state of the stopwatch

    def enter(self, turn: Turn) -> None:
        """Wait for the first turn of a new thread; called in that thread."""
        turn.given.acquire()
        self._mine = turn
        self.controller.switch(True)

    def _next(self) -> Turn:
        """Return the next turn; virtual time passes until a thread is ready.

        Raises:
            StandsStill: every thread waits, and no event is left.
        """
        while not self._ready:
            if not self._events:
                raise StandsStill(f"Nothing more happens after {self._now:.6g} s, and every thread waits.")
            self._now, _, happens = heapq.heappop(self._events)
            happens()
        return self._ready.popleft()


class VirtualCondition(threading.Condition):
    """A condition whose waiting takes virtual time.

    Its lock is contended only if a thread waits while holding it: threads change in ``wait`` alone.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._owner: Turn | None = None
        self._depth = 0
        self._locked_out: deque[Turn] = deque()
        self._asleep: list[list[Any]] = []  # for each waiting thread: its turn, whether it was notified

    def __enter__(self) -> bool:  # as short as a real lock, because its CPU time counts as the controller's
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
        """Release the lock, wait in virtual time, take the lock again; return whether the thread was notified."""
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
        """Wait until ``predicate()`` is true or the timeout is over; return its last value."""
        end = None if timeout is None else self.clock.now() + timeout
        while not (found := predicate()):
            left = None if end is None else end - self.clock.now()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        """Wake the first ``n`` waiting threads."""
        for entry in self._asleep[:n]:
            entry[1] = True
            self.clock.wake(entry[0])
        del self._asleep[:n]

    def notify_all(self) -> None:
        """Wake all waiting threads."""
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
    """A thread that runs when it has its turn."""

    def __init__(self, clock: VirtualClock, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._clock, self._work, self._own = clock, work, Turn()
        self._over = False
        self._waiting: list[Turn] = []

    def start(self) -> None:
        """Start the thread and mark it as ready to run."""
        super().start()
        self._clock.wake(self._own)

    def run(self) -> None:
        """Run the work with turns, then wake the threads that join."""
        self._clock.enter(self._own)
        try:
            self._work()
        finally:
            self._over = True
            for turn in self._waiting:
                self._clock.wake(turn)
            self._clock.leave()

    def join(self, timeout: float | None = None) -> None:
        """Wait in virtual time for the thread's end; the timeout limits only the real thread's end."""
        while not self._over:
            self._waiting.append(self._clock.turn())
            self._clock.wait()
        super().join(timeout)
