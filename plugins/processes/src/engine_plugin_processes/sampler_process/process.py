"""A sampler's process as its owner holds it: started, listened to, watched, ended.

The thread that waits for the process watches it: a process that ended, one that gives no sign of life, and one that has
been at the same piece of work for too long are ``Lost``.

consumes: messages of the process; waits for: replies, rollouts; unblocked by: these, and the loss of the process;
produces: what ``SamplerEngine`` takes.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from engine_plugin_processes.channel import Channel
from engine_plugin_processes.child import SOCKET, ChildProcess
from engine_plugin_processes.foreign_interpreter import OF_AN_INTERPRETER
from engine_plugin_processes.stalls import place

if TYPE_CHECKING:
    from engine_core.types import Rollout

log = logging.getLogger("engine")

MODULE = "engine_plugin_processes.sampler_process.child"
TICK_SECONDS = 0.1
CLOSE_SECONDS = 5.0
STACK_SECONDS = 2.0
AWAY_SECONDS = 1.0  # without a thread that waits: silence then counts from the next look
NOT_ITS_OWN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "ENGINE_TOKEN", "ENGINE_FAULT"),
)
"""Variables of the worker that an engine would take for its own, or that are none of its business."""

Found = TypeVar("Found")


class Lost(Exception):
    """The process has ended, or does not answer; it was killed. The text is the cause, with its last lines."""


class SamplerProcess(ChildProcess):
    """See the module.

    Args:
        python: the interpreter.
        memory: descriptor that it inherits, for weights.
        env: added to this process's environment.
        heartbeat_timeout_seconds: without a sign of life: it is lost.
        stall_seconds: at one piece of work: it is lost.
        other: the interpreter is of another environment.
    """

    def __init__(
        self,
        python: str,
        memory: int,
        env: Mapping[str, str],
        heartbeat_timeout_seconds: float,
        stall_seconds: float,
        other: bool,
    ) -> None:
        self.heartbeat_timeout_seconds, self.stall_seconds = heartbeat_timeout_seconds, stall_seconds
        self.arrived: collections.deque[Rollout] = collections.deque()
        self.failure: Mapping[str, Any] | None = None  # of a step
        self.idle = True  # it samples nothing
        self.went = False  # it was told to sample
        self.ready = False  # its engine is built and has the present weights
        self.lost = ""
        self._replies: dict[int, Mapping[str, Any]] = {}
        self._answers: collections.deque[Mapping[str, Any]] = collections.deque()  # of buckets
        self._stack: Any = None
        self._numbers = itertools.count(1)
        self._state = threading.Condition()
        self._seen = self._watched = self._watched_from = time.monotonic()
        self._spoke = False  # before, it imports the core
        self._busy = 0.0  # seconds that it was at one piece of work, as it last said
        self._closing = False
        dropped = {name for name in os.environ if name in NOT_ITS_OWN or name.startswith("TORCHELASTIC_")}
        dropped |= set(OF_AN_INTERPRETER) if other else set()
        super().__init__(
            [python, "-P", "-m", MODULE, SOCKET, str(memory)],
            Channel,
            take=self._receive_message,
            on_line=lambda line: log.info("sampler printed: %s", line),
            env={name: value for name, value in os.environ.items() if name not in dropped} | dict(env),
            descriptors=[memory],
            keeper=True,
        )

    # -- what is said to it -------------------------------------------------

    def next_number(self) -> int:
        """For a command."""
        return next(self._numbers)

    def ask(self, kind: str, seconds: float | None = None, **fields: Any) -> Mapping[str, Any] | None:
        """Have a command carried out; its reply, or None where none came in time.

        Raises:
            Lost: the process is gone; whether the command was carried out is not known.
            TypeError: a value does not cross.
        """
        number = self.next_number()
        self.send({"kind": kind, "id": number, **fields})
        return self.reply_to(number, seconds)

    def reply_to(self, number: int, seconds: float | None = None) -> Mapping[str, Any] | None:
        """The reply to a command; see ``ask``."""
        return self.wait(lambda: self._replies.pop(number, None), seconds)

    def answer_to(self, number: int) -> Mapping[str, Any]:
        """The next answer to a bucket of an update, or the reply that ends it."""

        def found() -> Mapping[str, Any] | None:
            while self._answers:
                answer = self._answers.popleft()
                if answer["id"] == number:
                    return answer
            return self._replies.pop(number, None)

        answer = self.wait(found)
        assert answer is not None
        return answer

    def wait(self, found: Callable[[], Found | None], seconds: float | None = None) -> Found | None:
        """Until ``found`` gives something, for so long at most.

        Raises:
            Lost: it never will. What the process said before its end was looked at.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            with self._state:
                if (result := found()) is not None:
                    return result
                if not self.lost:
                    left = TICK_SECONDS if end is None else min(TICK_SECONDS, end - time.monotonic())
                    if left <= 0:
                        return None
                    self._state.wait(left)
            if self.lost:
                with self._state:
                    if (result := found()) is not None:
                        return result
                raise Lost(self.lost)
            self._watch()

    # -- how it is ----------------------------------------------------------

    def _watch(self) -> None:
        """Whether it still works; asked often by whoever waits."""
        now = time.monotonic()
        if now - self._watched > AWAY_SECONDS:  # this process was elsewhere, or stopped
            self._watched_from = now
        self._watched = now
        silent = now - max(self._seen, self._watched_from)
        if self._spoke and silent > self.heartbeat_timeout_seconds:
            self.dump_stacks()
            self.lose(
                f"it gave no sign of life for {self.heartbeat_timeout_seconds:g} s (rollout.process.heartbeat_timeout_seconds): it is stopped, or "
                "its engine holds the interpreter"
            )
        elif self._busy > self.stall_seconds:
            where = self._where()
            self.lose(
                f"it has been at one piece of work for {self._busy / 60:.3g} minutes (rollout.process.command_timeout_minutes); "
                f"it is in {where}"
            )

    def _where(self) -> str:
        self.send({"kind": "stacks"})
        with self._state:
            self._state.wait_for(lambda: self._stack is not None, STACK_SECONDS)
        return place(self._stack)

    def lose(self, cause: str) -> None:
        """Kill it; a thread that waits for it gets ``Lost``."""
        self.lost = cause  # so that the thread that reads, which notices the end, has nothing to add
        self.kill()
        self._tell_lost(self.report(cause))

    def _tell_lost(self, why: str) -> None:
        with self._state:
            self.lost = why
            self._state.notify_all()

    def close(self) -> None:
        """End it: asked to where it is idle, else killed. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        if not self.lost and self.ready:
            self.send({"kind": "close"})
            self.ended(CLOSE_SECONDS if self._busy < 1 else TICK_SECONDS)
        self.kill()

    # -- what it says -------------------------------------------------------

    def _receive_message(self, message: Mapping[str, Any] | None) -> None:
        if message is not None:
            with self._state:
                self._take(message)
                self._state.notify_all()
        elif not self._closing and not self.lost:
            self._tell_lost(self.report())
            log.warning("The sampler's process is gone: it %s.", self.ending())

    def _take(self, message: Mapping[str, Any]) -> None:
        self._seen, self._spoke = time.monotonic(), True
        if "busy" in message:
            self._busy = message["busy"]
        elif "log" in message:
            logging.getLogger(message["name"]).log(message["level"], "sampler: %s", message["log"])
        elif "rollouts" in message:
            self.arrived.extend(message["rollouts"])
        elif "failed" in message:
            self.failure, self.idle = message["failed"], True
        elif "idle" in message:
            self.idle = True
        elif "stack" in message:
            self._stack = message["stack"]
        elif "bucket" in message:
            self._answers.append(message)
        else:
            self._replies[message["id"]] = message
