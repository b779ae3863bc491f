"""A session: a program in a sandbox that runs one piece of code after another and keeps its state in between.

It is one job of a box (``box``), which runs nothing else. Variables, files and the current folder last until the
session is closed. Nothing that the code does reaches further than in the box of a reward.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine_plugin_rewards.sandbox.box import Box, BoxProblem, job_file

PROGRAMS = ("/usr/bin", "/bin", f"{sys.base_prefix}/bin", "/etc/alternatives")
"""Folders of the programs of a shell."""
PROCESSES = 32
"""Processes that a shell may have."""
OUTPUT_BYTES = 256 * 1024
"""The beginning and the end of an output that are kept."""
FLOOD_BYTES = 64 << 20
"""Bytes of an output that are left out before the session is killed."""
REST_BYTES = 1 << 20  # read after the end of a piece: background processes may print without end


@dataclass(frozen=True)
class Reply:
    """What a piece of code printed, and how the session ended if it did."""

    output: bytes
    left_out: int  # bytes after the first half of ``output``
    ended: str  # empty: the session continues


class Session:
    """A session in a box.

    The box ends with the thread that makes this object, so that thread must outlive the session.

    Args:
        kind: the language. ``bash`` needs the tier ``namespaces``.
        tier: a name of ``tiers.TIERS``.
        seconds: time until the session ends by itself.
        show: further files and folders to read.
        memory_mb: address space of each process, MiB.
        disk_mb: size of the session's folder in memory, MiB.

    Raises:
        BoxProblem: the box cannot be started.
        OSError: a process cannot be started.
    """

    def __init__(
        self,
        kind: Literal["python", "bash"],
        tier: str,
        seconds: float,
        show: Sequence[str] = (),
        memory_mb: int = 512,
        disk_mb: int = 16,
    ) -> None:
        shell = kind == "bash"
        shown = [*show, *(PROGRAMS if shell else ())]
        self._seconds, self._what = seconds, {"kind": kind, "path": ":".join(PROGRAMS[:3])}
        self._ended = ""
        self._lock = threading.Lock()  # of the descriptors
        self._code = self._output = self._values = -1
        self._open = contextlib.ExitStack()
        processes = PROCESSES if shell else 1
        self._box = Box(tier, shown, memory_mb, disk_mb=disk_mb, processes=processes, wait=False)

    def run(self, source: str) -> Reply:
        """Run a piece of code and wait for its end, without a time limit; ``kill`` ends it.

        Raises:
            BoxProblem: the box cannot be closed to the outside.
        """
        with self._lock:
            if self._ended:
                return Reply(b"", 0, self._ended)
            if self._code < 0:
                self._begin()
            try:
                left = source.replace("\0", "").encode("utf-8", "replace") + b"\0"
                while left:
                    left = left[os.write(self._code, left) :]
            except BrokenPipeError:
                pass  # it has ended: the box says how
            return self._collect()

    def _begin(self) -> None:
        """Start the job and keep this end of its pipes.

        Raises:
            BoxProblem: the box is not closed to the outside, or was killed.
        """
        self._box.wait_ready()
        with contextlib.ExitStack() as theirs:
            (code, self._code), (self._output, output), (self._values, values) = (os.pipe() for _ in range(3))
            for ours in (self._code, self._output, self._values):
                self._open.callback(os.close, ours)
            for other in (code, output, values):
                theirs.callback(os.close, other)
            os.set_blocking(self._output, False)
            sent = [job_file(json.dumps(self._what).encode(), theirs), code, output, output, values]
            try:
                socket.send_fds(self._box.channel, [json.dumps({"seconds": self._seconds}).encode()], sent)
            except OSError as error:
                raise BoxProblem(f"the box does not answer: {error}") from error

    def _collect(self) -> Reply:
        """Read the output until the piece or the session ends, then what is left in the pipe. Kill a flood."""
        kept, left_out, rest = bytearray(), 0, REST_BYTES
        with selectors.DefaultSelector() as selector:
            for each in (self._box.channel, self._values, self._output):
                selector.register(each, selectors.EVENT_READ)
            running = True
            while running or rest > 0:
                ready = {key.fileobj for key, _ in selector.select(None if running else 0)}
                if running and self._values in ready:
                    running = not os.read(self._values, 4096)
                    if running:  # the program has closed it, or has ended
                        selector.unregister(self._values)
                elif running and self._box.channel in ready:
                    self._ended, running = self._end(), False
                data = os.read(self._output, 1 << 16) if self._output in ready else b""
                if not (data or running):
                    break
                if not data and self._output in ready:  # the program has closed it
                    selector.unregister(self._output)
                rest -= 0 if running else len(data)
                kept += data
                if (extra := len(kept) - OUTPUT_BYTES) > 0:
                    del kept[OUTPUT_BYTES // 2 : OUTPUT_BYTES // 2 + extra]
                    left_out += extra
                if running and left_out > FLOOD_BYTES:
                    self.kill()
                    self._ended, running = "was stopped: it printed too much", False
        return Reply(bytes(kept), left_out, self._ended)

    def _end(self) -> str:
        """Return how the session ended."""
        try:
            end = self._box.receive()
        except OSError:
            end = None
        if end is None:
            return "was stopped"
        code = end["code"]
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def kill(self) -> None:
        """Kill all processes of the session, from any thread; a call of ``run`` then returns."""
        self._box.kill()

    def close(self) -> None:
        """Kill all processes of the session and release what it holds; the session cannot be used any more."""
        self.kill()
        with self._lock:
            self._box.close()
            self._open.close()
            self._ended = self._ended or "was closed"
