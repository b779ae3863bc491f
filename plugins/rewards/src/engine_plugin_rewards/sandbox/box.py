"""The sandbox as the engine sees it: started once, given one program after another, gone when closed.

A small process waits inside (``inside``) and forks for each program, so that a start costs milliseconds. A program's
output and values come through pipes of this process. They are untrusted bytes and are judged here.

consumes: jobs, one at a time; waits for: the program's end, at most its time and ``GRACE_SECONDS``; produces:
``Ended``. A box that does not answer is killed and started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

INSIDE = Path(__file__).with_name("inside")
START_SECONDS = 60.0
GRACE_SECONDS = 5.0  # after a program's time, for the box to report the kill
ERRORS_BYTES = 4096  # kept of a program's stderr
SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/etc/ld.so.cache")
PRELOAD = (
    *("__future__", "abc", "array", "bisect", "cmath", "collections", "contextlib", "copy", "dataclasses"),
    *("datetime", "decimal", "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math"),
    *("numbers", "operator", "queue", "random", "re", "statistics", "string", "sys", "textwrap", "threading"),
    *("time", "traceback", "typing", "collections.abc"),
)
"""Modules that programs and tests are likely to import, imported once."""


class BoxProblem(Exception):
    """An error: the box could not be closed to the outside, or does not answer; the message says why."""


@dataclass(frozen=True)
class Ended:
    """The end of a program."""

    code: int  # exit status; negative: the signal that killed it
    late: bool  # killed because its time was over
    flooded: bool  # killed because it printed too much
    output: bytes
    errors: bytes  # the end of stderr
    values: bytes  # from the pipe for values


def readable(more: Sequence[str] = ()) -> list[str]:
    """Return the files and folders that a box shows, read-only: Python's library, the system's, and ``more``."""
    libraries = {sysconfig.get_path("stdlib"), f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib"}
    found = [*sorted(libraries), *SYSTEM, "/usr/share/zoneinfo", *more]
    return [path for path in found if os.path.exists(path)]


class Box:
    """A sandbox for programs.

    Args:
        tier: how it is closed: a name of ``tiers.TIERS``.
        show: further files and folders to read.
        memory_mb: address space of a program, MiB.
        output_kb: bytes on a program's stdout, and on its pipe for values, KiB each; more ends the program.
        disk_mb: size of a program's folder, in memory, MiB; 0: no folder. Below the tier ``namespaces`` it never has one.
        processes: number of processes that a program may have; more than 1 needs the tier ``namespaces``.
        wait: wait until the box is closed to the outside; False: the caller does, by ``wait_ready``.

    Raises:
        BoxProblem: this machine cannot close it that way. Nothing is left running.
    """

    def __init__(
        self,
        tier: str,
        show: Sequence[str] = (),
        memory_mb: int = 512,
        output_kb: int = 256,
        disk_mb: int = 16,
        processes: int = 1,
        wait: bool = True,
    ) -> None:
        self.tier, self.most = tier, output_kb * 1024
        self.order = {
            "tier": tier,
            "readable": readable(show),
            "memory_mb": memory_mb,
            "disk_mb": disk_mb,
            "processes": processes,
            "preload": PRELOAD,
            "parent": os.getpid(),
        }
        if wait:
            self._start()
        else:
            self._spawn()

    def _start(self) -> None:
        self._spawn()
        self.wait_ready()

    def _spawn(self) -> None:
        """Start the process. It ends with the thread that calls this."""
        if not sys.platform.startswith("linux"):
            raise BoxProblem("a sandbox needs Linux")
        command = [os.path.realpath(sys.executable), "-I", "-S", str(INSIDE), json.dumps(self.order)]
        self.channel, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with inner:
            self.popen = subprocess.Popen(
                command,
                stdin=inner.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until the box is closed to the outside.

        Raises:
            BoxProblem: this machine cannot close it that way. Nothing is left running.
        """
        self.channel.settimeout(START_SECONDS)
        try:
            report = self.receive()
        except OSError as exc:
            report = {"failed": str(exc)}
        if report is None or "failed" in report:
            self.close()
            raise BoxProblem(f"the box does not start: {report['failed'] if report else 'it ended'}")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message of the box; None if it has ended."""
        message = self.channel.recv(1 << 16)
        return json.loads(message) if message else None

    def run(self, what: Mapping[str, Any], stdin: bytes = b"", seconds: float = 5.0) -> Ended:
        """Run a program and wait for its end; it has ended when this returns.

        Args:
            what: the job for ``inside``: ``kind``, ``source`` and the fields of the kind.
            stdin: bytes that the program can read.
            seconds: wall-clock time limit.

        Raises:
            BoxProblem: the box broke, which no program should be able to cause; it was started again.
        """
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as theirs:
                reading = []
                sent = [job_file(data, theirs) for data in (json.dumps(dict(what)).encode(), stdin)]
                for _ in range(3):  # stdout, stderr, values
                    read, write = os.pipe()
                    reading.append(_closed_by(ours, read))
                    sent.append(_closed_by(theirs, write))
                try:
                    socket.send_fds(self.channel, [json.dumps({"seconds": seconds}).encode()], sent)
                except OSError as exc:
                    self._restart(str(exc))
            return self._collect(reading, time.monotonic() + seconds + GRACE_SECONDS)

    def _collect(self, reading: list[int], deadline: float) -> Ended:
        """Read all pipes until the box reports the program's end, then what is left in the pipes."""
        kept = {descriptor: bytearray() for descriptor in reading}
        output, errors, values = kept.values()
        most, flooded, end = self.most, False, None
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            for descriptor in reading:
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            while end is None:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._restart("no answer in time")
                for key, _ in ready:
                    if key.fileobj is self.channel:
                        end = self.receive() or self._restart("it ended")
                    elif not _read(key.fd, kept[key.fd]):
                        selector.unregister(key.fd)
                if not flooded and max(len(output), len(values)) > most:
                    flooded = True
                    self.channel.sendall(b"stop")
                for kind in (output, values):
                    del kind[most + 1 :]
                del errors[:-ERRORS_BYTES]
        for descriptor in reading:  # the end was reported before the last output was read
            while len(kept[descriptor]) <= most and _read(descriptor, kept[descriptor]):
                pass
        flooded |= max(len(output), len(values)) > most
        return Ended(
            code=end["code"],
            late=end["late"] and not flooded,
            flooded=flooded,
            output=bytes(output[:most]),
            errors=bytes(errors[-ERRORS_BYTES:]),
            values=bytes(values[:most]),
        )

    def _restart(self, why: str) -> NoReturn:
        """Replace the box and raise ``BoxProblem``."""
        self.close()
        self._start()
        raise BoxProblem(f"the box broke ({why}) and was started again")

    def kill(self) -> None:
        """Kill all processes of the box, unless it was closed: its id may be another process's by then."""
        if self.popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the box with all processes in it."""
        self.kill()
        self.popen.wait()
        self.channel.close()

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(descriptor: int, into: bytearray) -> bool:
    """Read from a pipe; return False at its end, or if it is empty for now."""
    try:
        data = os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return False
    into += data
    return bool(data)


def _closed_by(stack: contextlib.ExitStack, descriptor: int) -> int:
    """Return a descriptor that a stack will close."""
    stack.callback(os.close, descriptor)
    return descriptor


def job_file(data: bytes, stack: contextlib.ExitStack) -> int:
    """Return a descriptor of a file in memory from which ``data`` can be read; the stack will close it."""
    with os.fdopen(os.memfd_create("job", os.MFD_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        # opened again, read-only
        return _closed_by(stack, os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC))
