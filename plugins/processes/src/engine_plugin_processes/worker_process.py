"""The owner's handle of a worker: its channel, its mailbox, and its process if the owner started it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import cast

from engine_core import timeline
from engine_core.runs.logs import FILE_ONLY
from engine_plugin_processes.channel import Channel, Closed, end_with
from engine_plugin_processes.child import SOCKET, ChildProcess

UNANSWERED = "its host does not answer: it is down, or the network to it"
MODULE = "engine_plugin_processes.worker"

log = logging.getLogger("engine")


class WorkerHandle:
    """A handle of one worker process in its ``WorkerPool``.

    Args:
        rank: rank in the pool.
        channel: channel to the worker.
        process: the child process; None if an external launcher started the worker.
        host: host on which the worker runs.
        name: prefix of the worker's log lines; empty: "rank N", and no prefix for what rank 0 logs.
        heartbeat_timeout_seconds: the worker counts as lost after this time without a heartbeat; 0: it sends none.
    """

    def __init__(
        self,
        rank: int,
        channel: Channel,
        process: ChildProcess | None,
        host: str,
        name: str = "",
        heartbeat_timeout_seconds: float = 0.0,
    ) -> None:
        self.rank, self.channel, self.process, self.host = rank, channel, process, host
        self.name = name or f"rank {rank}"
        self.shown = bool(name) or rank == 0  # on screen, not only in the log file
        self.prefix = f"{self.name}: " if name or rank else ""
        self.roles: tuple[str, ...] = ("worker",)
        self.heartbeat_timeout_seconds = heartbeat_timeout_seconds
        self.heartbeat: float | None = None  # time of the last heartbeat
        if process is not None:
            process.on_line = self._show
        self._mailbox: list[int] = []  # unanswered commands, in order
        self._since = 0.0  # when the first of them began
        self._died_at: float | None = None
        self._line: Channel | None = None  # idle, to a worker on another host
        self._missed = False
        self._clock = 0.0  # seconds by which the worker's clock is late

    @classmethod
    def start(
        cls,
        rank: int,
        env: Mapping[str, str | None],
        python: str = sys.executable,
        *,
        keeper: bool = False,
        name: str = "",
        heartbeat_timeout_seconds: float = 0.0,
    ) -> WorkerHandle:
        """Start a worker as a child of this process.

        Args:
            rank: rank in the pool.
            env: environment variables that differ from this process's; None removes a variable.
            python: the worker's interpreter.
            keeper: as in ``ChildProcess``.
            name: as in the class.
            heartbeat_timeout_seconds: as in the class.

        Raises:
            OSError: the interpreter does not start.
        """
        variables = {key: value for key, value in {**os.environ, **env}.items() if value is not None}
        process = ChildProcess([python, "-P", "-m", MODULE, SOCKET], Channel, env=variables, keeper=keeper)
        channel = cast("Channel", process.channel)
        return cls(rank, channel, process, socket.gethostname(), name, heartbeat_timeout_seconds)

    # -- its mailbox --------------------------------------------------------

    def begin(self, number: int) -> None:
        """Note that a command was put into the mailbox."""
        if not self._mailbox:
            self._since = time.monotonic()
        self._mailbox.append(number)

    def finish(self, number: int) -> None:
        """Note that the worker has answered a command."""
        if number in self._mailbox:
            self._mailbox.remove(number)
            self._since = time.monotonic()

    def at(self) -> tuple[int, float]:
        """Return the number of the current command (0: none) and the time when it began."""
        return (self._mailbox[0] if self._mailbox else 0), self._since

    def record(self, role: str, sent: float, spans: Sequence[timeline.Span]) -> None:
        """Add the spans of a command to the timeline, in this process's time.

        Args:
            role: role of the command.
            sent: when the command was sent; the worker's clock is corrected to be later, and not later than now.
            spans: the worker's spans since its last answer. Those of its commands have no group.
        """
        own = [each for each in spans if not each[0]]
        for start, end in ((each[3], each[4]) for each in own):
            self._clock = min(max(self._clock, sent - start), timeline.now() - end)
        for group, lane, name, start, end in spans:
            shown = lane if lane.startswith("#") else f"{self.name} {lane}" if group else self.name
            timeline.add(group or role, shown, name, start + self._clock, end + self._clock)

    # -- its end ------------------------------------------------------------

    def watch(self, line: Channel) -> None:
        """Count the worker as lost once an idle connection to its host ends."""
        self._line = line
        end_with(line, self._miss)

    def _miss(self, end: Closed) -> None:
        self._missed = isinstance(end.__cause__, TimeoutError)  # else the other side has closed it
        self.channel.close()

    def notice_death(self) -> None:
        """Close the channel of an ended process if a process that it started keeps the socket open for a second."""
        if self.process is None or self.process.popen.poll() is None:
            return
        self._died_at = self._died_at or time.monotonic()
        if time.monotonic() - self._died_at > 1.0:
            self.channel.close()

    def silence(self) -> str:
        """Return why the worker counts as lost although its connection is open; "" if it does not."""
        seconds = self.heartbeat_timeout_seconds
        if seconds and self.heartbeat is not None and time.monotonic() - self.heartbeat > seconds:
            if self.process is not None:
                self.process.dump_stacks()
            return (
                f"it sent no heartbeat for {seconds:g} s: it is stopped, or its engine holds the interpreter"
            )
        return ""

    def how_it_ended(self, cause: str = "") -> str:
        """Return how the worker ended, with the last lines that it printed if it is a child process."""
        if self.process is None:
            cause = cause or (UNANSWERED if self._missed else "")
            return f"{cause or 'its connection ended; the launcher on its host has its output'}."
        return self.process.report(cause)

    def ask_to_end(self) -> None:
        """Send the command to exit; ignore a closed channel."""
        with contextlib.suppress(Closed):
            self.channel.send({"kind": "close"})

    def ended(self, seconds: float) -> bool:
        """Return whether the process ends within that time; True if it is not a child of this process."""
        return self.process is None or self.process.ended(seconds)

    def kill(self) -> None:
        """Kill the process and the processes that it started."""
        if self.process is not None:
            self.process.kill()
        self.channel.close()
        if self._line is not None:
            self._line.close()

    def _show(self, line: str) -> None:
        """Log a line that the worker printed; on screen only if the worker is shown."""
        log.info("%s printed: %s", self.name, line, extra=None if self.shown else FILE_ONLY)
