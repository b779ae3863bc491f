"""A worker as its owner holds it: the channel, the mailbox, and the process where the owner has started it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import cast

from engine_core.runs.logs import FILE_ONLY
from engine_plugin_processes.channel import Channel, Closed
from engine_plugin_processes.child import SOCKET, ChildProcess
from engine_plugin_processes.peer_watch import PeerWatch

MODULE = "engine_plugin_processes.worker"
# between two looks at the heartbeat: this process was stopped, and cannot tell what happened meanwhile
AWAY_SECONDS = 2.0

log = logging.getLogger("engine")


class WorkerHandle:
    """A worker process as seen by its ``WorkerPool``.

    Args:
        rank: within the pool.
        channel: to the worker.
        process: the child process; None if an external launcher has started the worker.
        host: where it runs.
        name: in front of what it prints and logs; empty: "rank N", and what rank 0 logs stands without a name.
        heartbeat_timeout_seconds: without a heartbeat for so long the worker counts as lost; 0: it sends none.
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
        self.shown = bool(name) or rank == 0  # on the screen, not in the file alone
        self.prefix = f"{self.name}: " if name or rank else ""
        self.roles: tuple[str, ...] = ("worker",)
        self.newest = "nothing yet"  # that it printed or logged
        self.heartbeat_timeout_seconds = heartbeat_timeout_seconds
        self.heartbeat: float | None = None  # time of the last one
        self._looked = time.monotonic()
        if process is not None:
            process.on_line = self._show
        self._mailbox: list[int] = []  # commands that it has not answered, in their order
        self._since = 0.0  # it is at the first of them
        self._died_at: float | None = None
        self._silence = PeerWatch(channel.socket)

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
            rank: within the pool.
            env: variables that differ from those of this process; None removes one.
            python: its interpreter.
            keeper: see ``ChildProcess``.
            name: see the class.
            heartbeat_timeout_seconds: see the class.

        Raises:
            OSError: the interpreter does not start.
        """
        variables = {key: value for key, value in {**os.environ, **env}.items() if value is not None}
        process = ChildProcess([python, "-P", "-m", MODULE, SOCKET], Channel, env=variables, keeper=keeper)
        channel = cast("Channel", process.channel)
        return cls(rank, channel, process, socket.gethostname(), name, heartbeat_timeout_seconds)

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

    def silence(self) -> str:
        """Return why the worker counts as lost although its connection is open; "" if it does not."""
        now = time.monotonic()
        if now - self._looked > AWAY_SECONDS and self.heartbeat is not None:
            self.heartbeat = now
        self._looked = now
        seconds = self.heartbeat_timeout_seconds
        if seconds and self.heartbeat is not None and now - self.heartbeat > seconds:
            if self.process is not None:
                self.process.dump_stacks()
            return (
                f"it sent no heartbeat for {seconds:g} s: it is stopped, or its engine holds the interpreter"
            )
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
        log.info("%s printed: %s", self.name, line, extra=None if self.shown else FILE_ONLY)
