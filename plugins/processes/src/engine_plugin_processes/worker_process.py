"""One worker as the controller holds it: its process where that is ours, its channel, the end of what it printed."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from engine_core.runs.logs import FILE_ONLY
from engine_plugin_processes.channel import Channel, Closed, pair
from engine_plugin_processes.peer_watch import PeerWatch

log = logging.getLogger("engine")

LAST_LINES = 40
ENDING_SECONDS = 3.0  # for a process whose socket has closed


class WorkerHandle:
    """See the module.

    A thread reads what the process prints. consumes: its lines; waits for: the next; unblocked by: lines, its end; produces:
    records of the log, ``last_lines``.

    Args:
        rank: of the run.
        channel: to it.
        process: where it is a child of ours; another's belongs to the launcher that started it.
        host: where it runs.
    """

    def __init__(
        self, rank: int, channel: Channel, process: subprocess.Popen[bytes] | None, host: str
    ) -> None:
        self.rank, self.channel, self.process, self.host = rank, channel, process, host
        self.roles: tuple[str, ...] = ("worker",)
        self.newest = "nothing yet"  # that it printed or logged
        self.last_lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._mailbox: list[int] = []  # commands that it has not answered, in their order
        self._since = 0.0  # it is at the first of them
        self._died_at: float | None = None
        self._killed = False  # its number may be another process's by now
        self._silence = PeerWatch(channel.socket)
        self._printed: threading.Thread | None = None
        if process is not None and process.stderr is not None:
            self._printed = threading.Thread(target=self._print, args=(process.stderr,), daemon=True)
            self._printed.start()

    @classmethod
    def start(cls, rank: int, env: Mapping[str, str]) -> WorkerHandle:
        """A child of this process, of a session of its own, so that what it starts is killed with it."""
        ours, theirs = pair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "engine_plugin_processes.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, **env},
            )
        return cls(rank, Channel(ours), process, socket.gethostname())

    # -- its mailbox --------------------------------------------------------

    def begin(self, number: int) -> None:
        """A command was put into its mailbox."""
        if not self._mailbox:
            self._since = time.monotonic()
        self._mailbox.append(number)

    def finish(self, number: int) -> None:
        """It has answered a command."""
        if number in self._mailbox:
            self._mailbox.remove(number)
            self._since = time.monotonic()

    def at(self) -> tuple[int, float]:
        """The command in hand (0: none), and since when."""
        return (self._mailbox[0] if self._mailbox else 0), self._since

    # -- its end ------------------------------------------------------------

    def notice_death(self) -> None:
        """A process that ended closes its socket, unless something that it started holds it too."""
        if self.process is None or self.process.poll() is None:
            return
        self._died_at = self._died_at or time.monotonic()
        if time.monotonic() - self._died_at > 1.0:
            self.channel.close()

    def host_is_gone(self) -> str:
        """Why its host counts as gone, without a word; "": it does not."""
        return self._silence.told

    def how_it_ended(self, cause: str = "") -> str:
        """In words, with the end of what it printed."""
        if self.process is None:
            ending = "its connection ended; the launcher on its host has its output"
        else:
            try:
                code = self.process.wait(ENDING_SECONDS)
                ending = ending_of(code)
            except subprocess.TimeoutExpired:
                ending = "it closed its connection and runs on"
            if self._printed is not None:
                self._printed.join(1.0)
        text = "\n".join(self.last_lines)
        said = f" The last that it printed:\n{text}" if text else ""
        return f"{cause or ending}.{said}"

    def ask_to_end(self) -> None:
        with contextlib.suppress(Closed):
            self.channel.send({"kind": "close"})

    def ended(self, seconds: float) -> bool:
        """Whether it ends within that time."""
        if self.process is None:
            return True
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it and what it started, now."""
        if self.process is not None and not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.channel.close()
        if self._printed is not None:
            self._printed.join(1.0)

    def _print(self, stream: IO[bytes]) -> None:
        """What it prints goes to the log: of the first rank to the screen too."""
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                self.newest = line
                self.last_lines.append(line)
                extra: dict[str, Any] | None = None if self.rank == 0 else FILE_ONLY
                log.info("rank %d printed: %s", self.rank, line, extra=extra)


def ending_of(code: int) -> str:
    """How a process ended, in words."""
    if code == -signal.SIGKILL:
        return "it was killed by SIGKILL (by somebody, or for want of memory)"
    return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with status {code}"
