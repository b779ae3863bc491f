"""A supervised child process: its channel, the last lines that it prints, its stacks, how it ended.

Each child leads a session, so that processes it starts are killed with it. Its owner decides whether to start another
child, because the owner knows which work was lost.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from engine_plugin_processes.json_channel import Closed, JsonChannel, Outbox, close_in_children

SOCKET = "{socket}"
"""Placeholder in a command for the number of the inherited socket."""
LAST_LINES = 40
KEPT_LINES = 400  # a dump of stacks is longer than ``LAST_LINES``
LINE_BYTES = 8192  # a longer line is cut into several
ENDING_SECONDS = 3.0  # for a process whose socket has closed
OUTPUT_SECONDS = 1.0  # for the rest of its messages and lines once it has ended
STACK_SECONDS = 0.1  # for its stacks to be printed
STACK_SIGNAL = signal.SIGUSR2


class ChildProcess:
    """A child process from its start to its end.

    One thread reads its messages, one reads its output, one sends. consumes: messages, lines; waits for: the next;
    unblocked by: these, the end of the child; produces: calls of ``take`` and ``on_line``.

    Args:
        command: program and arguments.
        channel: class of the channel to the child; None: it has no socket.
        take: called with each message, and with None after the last; it may be called before the constructor returns.
            None: the caller reads and writes ``channel``.
        on_line: called with each line that the child prints.
        env: its whole environment; None: the environment of this process.
        keeper: end the child when this process ends, even if it is busy (``keeper.py``). A child that reads its socket
            ends by itself.

    Raises:
        OSError: the program does not start.
    """

    def __init__(
        self,
        command: Sequence[str],
        channel: type[JsonChannel] | None = None,
        *,
        take: Callable[[Any], None] | None = None,
        on_line: Callable[[str], None] | None = None,
        env: Mapping[str, str] | None = None,
        keeper: bool = False,
    ) -> None:
        self.on_line = on_line
        self._nonsense = ""  # how the child broke the protocol
        self._killed = False  # then its process id may belong to another process
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        passed: list[int] = []
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:

            def pair() -> tuple[socket.socket, str]:
                """Return our end of a socket pair, and the number of the descriptor that the child inherits."""
                here, there = socket.socketpair()
                ours.enter_context(here)
                theirs.enter_context(there)
                passed.append(there.fileno())
                return close_in_children(here), str(there.fileno())

            if channel is not None:
                connection, number = pair()
                command = [number if word == SOCKET else word for word in command]
            if keeper:
                if shutil.which(command[0]) is None:
                    raise FileNotFoundError(f"'{command[0]}' is no program that this user may run")
                _, number = pair()
                script = Path(__file__).with_name("keeper.py")
                command = [sys.executable, "-I", "-S", str(script), number, *command]
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=passed,
                start_new_session=True,
                env=env,
            )
            self._ends = ours.pop_all()
        self._threads = [threading.Thread(target=self._print, daemon=True)]
        if channel is not None:
            self.channel = channel(connection)
        if take is not None:
            self.outbox = Outbox(self.channel)
            self._ends.callback(self.outbox.close)
            self._threads.append(threading.Thread(target=self._read, args=(take,), daemon=True))
        if channel is not None:
            self._ends.callback(
                self.channel.close
            )  # before the outbox, which may wait for room in the socket
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        """Send a message after those before it, without waiting; a child that has ended does not receive it.

        Raises:
            TypeError: a value cannot be encoded; nothing is sent.
        """
        self.outbox.put(message)

    def tail(self, lines: int = LAST_LINES) -> str:
        """Return the last lines that the child printed."""
        return "\n".join(list(self._lines)[-lines:])

    def dump_stacks(self) -> None:
        """Make a child that has called ``print_stacks_on_request`` print the stacks of its threads."""
        self.popen.send_signal(STACK_SIGNAL)
        time.sleep(STACK_SECONDS)

    def ended(self, seconds: float) -> bool:
        """Return whether the child ends within that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(seconds)
        return self.popen.returncode is not None

    def ending(self) -> str:
        """Return how the child ended, in words that follow its name."""
        if self._nonsense:
            return self._nonsense
        if not self.ended(ENDING_SECONDS):
            return "closed its connection and runs on"
        code = self.popen.returncode
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (by a user, or for lack of memory)"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def report(self, cause: str = "") -> str:
        """Return why the child is lost, by default how it ended, with the last lines that it printed."""
        cause = cause or f"it {self.ending()}"
        self._threads[0].join(OUTPUT_SECONDS)
        text = self.tail()
        return f"{cause}.{f' The last that it printed:{chr(10)}{text}' if text else ''}"

    def kill(self) -> None:
        """Kill the child and the processes that it started; read its remaining output. Safe to call twice."""
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        for thread in self._threads:
            thread.join(OUTPUT_SECONDS)
        self._ends.close()

    def _read(self, take: Callable[[Any], None]) -> None:
        while (message := self._receive()) is not None:
            take(message)
        take(None)

    def _receive(self) -> Any:
        try:
            return self.channel.receive()
        except Closed:
            return None
        except ValueError as error:
            self._nonsense = f"sent something else than an answer: {error}"
            return None

    def _print(self) -> None:
        with cast(IO[bytes], self.popen.stdout) as stream:
            while raw := stream.readline(LINE_BYTES):
                line = raw.decode(errors="replace").rstrip()
                self._lines.append(line)
                if self.on_line is not None:
                    self.on_line(line)


def python_command(entry: str) -> list[str]:
    """Return a command that calls ``module:function`` with the number of the socket.

    The command is a fresh interpreter with the path of this one, without its main script and its memory.
    """
    module, _, function = entry.partition(":")
    code = f"import sys; sys.path[:] = sys.argv[2:]; from {module} import {function}; {function}(int(sys.argv[1]))"
    return [sys.executable, "-P", "-c", code, SOCKET, *(os.path.abspath(folder) for folder in sys.path)]


def print_stacks_on_request() -> None:
    """Print all stacks on ``STACK_SIGNAL``, even while a thread holds the interpreter, and on a crash; for a child."""
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
