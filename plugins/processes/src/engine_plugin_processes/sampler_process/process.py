"""A sampler's process as its owner holds it: started, listened to, watched, ended.

A thread reads what it says, another what it prints. It is watched by whoever waits for it: a process that ended, one
that gives no sign of life, one that has been at the same piece of work for too long are ``Lost``.

consumes: messages of the process; waits for: replies, rollouts; unblocked by: these, and the loss of the process;
produces: what ``SamplerEngine`` takes.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from io import FileIO
from typing import IO, TYPE_CHECKING, Any, TypeVar

from engine_core.inherited_descriptors import close_in_children
from engine_plugin_processes.channel import Channel, Closed, Outbox, pair
from engine_plugin_processes.codec import DecodeError
from engine_plugin_processes.foreign_interpreter import OF_AN_INTERPRETER
from engine_plugin_processes.stalls import place
from engine_plugin_processes.worker_process import LAST_LINES, ending_of

if TYPE_CHECKING:
    from engine_core.types import Rollout

log = logging.getLogger("engine")

MODULE = "engine_plugin_processes.sampler_process.child"
TICK_SECONDS = 0.1
ENDING_SECONDS = 3.0  # for a process whose socket has closed
CLOSE_SECONDS = 5.0
STACK_SECONDS = 2.0
AWAY_SECONDS = 1.0  # without anybody watching: silence then counts from the next look
NOT_ITS_OWN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "ENGINE_TOKEN", "ENGINE_FAULT"),
)
"""Variables of the worker that an engine would take for its own, or that are none of its business."""

Found = TypeVar("Found")


class Lost(Exception):
    """The process has ended, or does not answer; it was killed. The text is the cause, with its last lines."""


class SamplerProcess:
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
        self.last_lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._replies: dict[int, Mapping[str, Any]] = {}
        self._answers: collections.deque[Mapping[str, Any]] = collections.deque()  # of buckets
        self._stack: Any = None
        self._numbers = itertools.count(1)
        self._state = threading.Condition()
        self._seen = self._watched = self._watched_from = time.monotonic()
        self._spoke = False  # before, it imports the core
        self._busy = 0.0  # seconds that it was at one piece of work, as it last said
        self._closing = False
        self.popen, self.channel, self._life = _start(python, memory, env, other)
        self.outbox = Outbox(self.channel)
        assert self.popen.stderr is not None
        self._printer = threading.Thread(target=self._print, args=(self.popen.stderr,), daemon=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._printer.start()
        self._reader.start()

    # -- what is said to it -------------------------------------------------

    def post(self, message: Mapping[str, Any]) -> None:
        """Say something; nothing is waited for."""
        self.outbox.put(message)

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
        self.post({"kind": kind, "id": number, **fields})
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
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.popen.pid, signal.SIGUSR2)  # its stacks go to what it prints
            time.sleep(TICK_SECONDS)
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
        self.post({"kind": "stacks"})
        with self._state:
            self._state.wait_for(lambda: self._stack is not None, STACK_SECONDS)
        return place(self._stack)

    def lose(self, cause: str) -> None:
        """Kill it; whoever waits is told."""
        self._kill()
        told = self._told(cause)
        with self._state:
            self.lost = told
            self._state.notify_all()

    def _told(self, cause: str) -> str:
        self._printer.join(1.0)
        text = "\n".join(self.last_lines)
        return f"{cause}.{f' The last that it printed:{chr(10)}{text}' if text else ''}"

    def close(self) -> None:
        """End it: asked to where it is idle, else killed. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        if not self.lost and self.ready:
            self.post({"kind": "close"})
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(CLOSE_SECONDS if self._busy < 1 else TICK_SECONDS)
        self._kill()
        self._reader.join(CLOSE_SECONDS)
        self._printer.join(1.0)

    def _kill(self) -> None:
        """It and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self._life.close()
        self.channel.close()
        self.outbox.close()

    # -- what it says -------------------------------------------------------

    def _read(self) -> None:
        cause = ""
        try:
            while True:
                message = self.channel.receive()
                with self._state:
                    self._take(message)
                    self._state.notify_all()
        except Closed:
            pass
        except DecodeError as error:
            cause = f"it sent something else than an answer: {error}"
        if not self._closing and not self.lost:
            cause = cause or self._ending()
            told = self._told(cause)
            with self._state:
                self.lost = self.lost or told
                self._state.notify_all()
            log.warning("The sampler's process is gone: %s", cause)

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

    def _ending(self) -> str:
        try:
            return ending_of(self.popen.wait(ENDING_SECONDS))
        except subprocess.TimeoutExpired:
            return "it closed its connection and runs on"

    def _print(self, stream: IO[bytes]) -> None:
        """What it prints goes to the log."""
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                self.last_lines.append(line)
                log.info("sampler printed: %s", line)


def _start(
    python: str, memory: int, env: Mapping[str, str], other: bool
) -> tuple[subprocess.Popen[bytes], Channel, FileIO]:
    """The process, the line to it, and the end of a pipe that closes with this process."""
    dropped = {name for name in os.environ if name in NOT_ITS_OWN or name.startswith("TORCHELASTIC_")}
    dropped |= set(OF_AN_INTERPRETER) if other else set()
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    ours, theirs = pair()
    ends, writing = os.pipe()
    life = close_in_children(FileIO(writing, "w"))
    try:
        with theirs:
            popen = subprocess.Popen(
                [
                    python, "-P", "-m", MODULE, str(theirs.fileno()), str(ends), str(memory), str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno(), ends, memory],
                start_new_session=True,  # what it starts is killed with it
                env={**environment, **env},
            )  # fmt: skip
    except BaseException:
        life.close()
        ours.close()
        raise
    finally:
        os.close(ends)
    return popen, Channel(ours), life
