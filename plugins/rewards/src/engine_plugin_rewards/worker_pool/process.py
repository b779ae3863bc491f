"""One worker process and its pipes: lines out, lines in, output kept, never blocking."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from engine_core.inherited_descriptors import close_in_children

MAX_REPLY_BYTES = 16 * 2**20  # more without a line's end is no reply of ours
OUTPUT_BYTES = 16384  # kept of what a function prints
SHOWN_CHARACTERS = 3000


class WorkerProcess:
    """A process of its own session, so that what it forks is killed with it.

    Args:
        order: the first line that it is sent.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        # -P: the script's folder is not on the path. The environment is the controller's.
        command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))]
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        self.requests = close_in_children(cast(BinaryIO, self.popen.stdin))
        self.replies = cast(BinaryIO, self.popen.stdout)
        self.printed = cast(BinaryIO, self.popen.stderr)
        for stream in (self.requests, self.replies, self.printed):
            os.set_blocking(stream.fileno(), False)
        self.outgoing = b""
        self.incoming = bytearray()
        self.output = bytearray()
        self.open = {self.replies, self.printed}
        self.send(order)

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message; ``pump`` writes it."""
        self.outgoing += json.dumps(message).encode() + b"\n"

    @property
    def dead(self) -> bool:
        """Whether it ended, or can no longer answer."""
        return self.replies not in self.open or self.popen.poll() is not None

    def drain(self) -> None:
        """Read what a dead process had still written."""
        while self.replies in self.open and (data := self._read(self.replies)):
            self.incoming += data

    def received(self) -> list[dict[str, Any]]:
        """The messages that have come since the last call; nonsense on the pipe counts as its end."""
        *lines, rest = bytes(self.incoming).split(b"\n")
        self.incoming = bytearray(rest)
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            messages, rest = [], b"x" * (MAX_REPLY_BYTES + 1)
        if len(rest) > MAX_REPLY_BYTES:
            self.open.discard(self.replies)
        return messages

    def write(self) -> None:
        try:
            self.outgoing = self.outgoing[os.write(self.requests.fileno(), self.outgoing) :]
        except BrokenPipeError:  # it died: told by `dead`
            self.outgoing = b""

    def read_replies(self) -> None:
        self.incoming += self._read(self.replies)

    def read_output(self) -> None:
        self.output = (self.output + self._read(self.printed))[-OUTPUT_BYTES:]

    def _read(self, stream: BinaryIO) -> bytes:
        try:
            data = os.read(stream.fileno(), 1 << 20)
        except BlockingIOError:
            return b""
        if not data:
            self.open.discard(stream)
        return data

    def ending(self) -> str:
        """How it ended, after ``kill``."""
        code = self.popen.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def printed_last(self) -> str:
        """Where it was when it ended (faulthandler tells the innermost line first), else the end of what it printed."""
        text = self.output.decode(errors="replace").strip()
        start = max(text.rfind("Timeout ("), text.rfind("Fatal Python error"))
        return text[start:][:SHOWN_CHARACTERS] if start >= 0 else text[-SHOWN_CHARACTERS:]

    def kill(self) -> None:
        """End it and what it forked, now; read what it still had to say."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        if self.printed in self.open:
            self.read_output()
        for stream in (self.requests, self.replies, self.printed):
            stream.close()
        self.open.clear()


def pump(processes: Sequence[WorkerProcess], timeout: float) -> None:
    """Move bytes from and to some processes; returns when some moved, or after ``timeout`` seconds."""
    with selectors.DefaultSelector() as selector:
        for process in processes:
            for stream, move in (
                (process.replies, process.read_replies),
                (process.printed, process.read_output),
            ):
                if stream in process.open:
                    selector.register(stream, selectors.EVENT_READ, move)
            if process.outgoing:
                selector.register(process.requests, selectors.EVENT_WRITE, process.write)
        for key, _ in selector.select(timeout):
            key.data()
