"""One worker as the controller holds it: its channel, its mailbox, and its process where that is a child of ours."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping

from engine_core.runs.logs import FILE_ONLY
from engine_plugin_processes.channel import Channel, Closed
from engine_plugin_processes.child import SOCKET, ChildProcess
from engine_plugin_processes.peer_watch import PeerWatch

log = logging.getLogger("engine")


class WorkerHandle:
    """See the module.

    Args:
        rank: of the run.
        channel: to it.
        process: where it is a child of ours; another's belongs to the launcher that started it.
        host: where it runs.
    """

    def __init__(self, rank: int, channel: Channel, process: ChildProcess | None, host: str) -> None:
        self.rank, self.channel, self.process, self.host = rank, channel, process, host
        self.roles: tuple[str, ...] = ("worker",)
        self.newest = "nothing yet"  # that it printed or logged
        if process is not None:
            process.on_line = self._show
        self._mailbox: list[int] = []  # commands that it has not answered, in their order
        self._since = 0.0  # it is at the first of them
        self._died_at: float | None = None
        self._silence = PeerWatch(channel.socket)

    @classmethod
    def start(cls, rank: int, env: Mapping[str, str]) -> WorkerHandle:
        """Start a child of this process."""
        process = ChildProcess(
            [sys.executable, "-m", "engine_plugin_processes.worker", SOCKET],
            Channel,
            env={**os.environ, **env},
        )
        return cls(rank, process.channel, process, socket.gethostname())

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
        if self.process is None or self.process.popen.poll() is None:
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
            return f"{cause or 'its connection ended; the launcher on its host has its output'}."
        return self.process.report(cause)

    def ask_to_end(self) -> None:
        with contextlib.suppress(Closed):
            self.channel.send({"kind": "close"})

    def ended(self, seconds: float) -> bool:
        """Whether it ends within that time."""
        return self.process is None or self.process.ended(seconds)

    def kill(self) -> None:
        """End it and what it started, now."""
        if self.process is not None:
            self.process.kill()
        self.channel.close()

    def _show(self, line: str) -> None:
        """Log what it prints: of the first rank to the screen too."""
        self.newest = line
        log.info("rank %d printed: %s", self.rank, line, extra=None if self.rank == 0 else FILE_ONLY)
