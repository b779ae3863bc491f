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
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSIDE = Path(__file__).with_name("inside")
START_SECONDS = 60.0
GRACE_SECONDS = 5.0  # after a program's time, for the box to report the kill
ERRORS_BYTES = 4096  # kept of a program's stderr
THREADS = 32  # of a program that may not start processes
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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The resources that one program may use."""

    memory_mb: int = 512
    """Address space, MiB."""
    output_kb: int = 256
    """Bytes on stdout, and on the pipe for values, KiB each; more ends the program."""
    disk_mb: int = 16
    """Size of its folder, in memory, MiB; 0: no folder. Below the tier ``namespaces`` a program never has one."""
    processes: int = 1
    """Processes at the same time; 1: it may not start any. More need the tier ``namespaces``."""


@dataclass(frozen=True)
class Ended:
    """The end of a program."""

    code: int  # exit status; negative: the signal that killed it
    late: bool  # killed because its time was over
    flooded: bool  # killed because it printed too much
    output: bytes
    errors: bytes  # the end of stderr
    values: bytes  # from the pipe for values
    cpu: float  # seconds


def readable(more: Sequence[str] = ()) -> list[str]:
    """Return the files and folders that a box shows, read-only: Python's library, the system's, and ``more``."""
    libraries = {sysconfig.get_path("stdlib"), f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib"}
    found = [*sorted(libraries), *SYSTEM, "/usr/share/zoneinfo", *more]
    return [path for path in found if os.path.exists(path)]


class Box:
    """A sandbox for programs.

    Args:
        tier: how it is closed: a name of ``tiers.TIERS``.
        limits: the limits of each program.
        show: further files and folders to read.
        executing: programs are started with ``exec`` (languages other than Python).

    Raises:
        BoxProblem: this machine cannot close it that way. Nothing is left running.
    """

    def __init__(self, tier: str, limits: Limits, show: Sequence[str] = (), executing: bool = False) -> None:
        self.tier, self.limits = tier, limits
        self.order = {
            "tier": tier,
            "readable": readable(show),
            "memory_mb": limits.memory_mb,
            "disk_mb": limits.disk_mb,
            "processes": limits.processes,
            "threads": THREADS,
            "executing": executing,
            "preload": () if executing else PRELOAD,
            "parent": os.getpid(),
        }
        self.jobs = 0
        self.report: Mapping[str, Any] = {}
        self._start()

    def _start(self) -> None:
        command = self._command()
        self.channel, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with inner, tempfile.TemporaryFile() as said:
            streams: Any = {"stdin": inner, "stdout": said, "stderr": said}
            try:
                self.popen = subprocess.Popen(command, **streams, env={}, cwd="/", start_new_session=True)
            except OSError:
                self.channel.close()
                raise
            inner.close()
            self.channel.settimeout(START_SECONDS)
            try:
                self.report = self._answer()
            except (BoxProblem, OSError) as exc:
                self.close()
                said.seek(0)
                last = said.read()[-500:].decode(errors="replace").strip().splitlines()[-1:]
                raise BoxProblem(f"the box does not start: {(last or [exc])[0]}") from exc
        if "failed" in self.report:
            self.close()
            raise BoxProblem(str(self.report["failed"]))

    def _command(self) -> list[str]:
        python = os.path.realpath(sys.executable)
        inside = [python, "-I", "-S", str(INSIDE), json.dumps(self.order)]
        if self.tier != "bubblewrap":
            return inside
        program = shutil.which("bwrap")
        if program is None:
            raise BoxProblem("there is no program 'bwrap'")
        if os.geteuid() == 0 and self.limits.processes > 1:
            raise BoxProblem("for root, bubblewrap has no limit of processes")
        return [program, *_bubblewrap([*self.order["readable"], python, str(INSIDE)]), "--", *inside]

    def run(self, what: Mapping[str, Any], stdin: bytes = b"", seconds: float = 5.0) -> Ended:
        """Run a program and wait for its end; all processes that it started have ended when this returns.

        Args:
            what: the job for ``inside``: ``kind``, ``source`` and the fields of the kind.
            stdin: bytes that the program can read.
            seconds: wall-clock time limit.

        Raises:
            BoxProblem: the box broke, which no program should be able to cause; it was started again.
        """
        self.jobs += 1
        outputs = [os.pipe() for _ in range(3)]  # stdout, stderr, values
        reading, writing = [pair[0] for pair in outputs], [pair[1] for pair in outputs]
        with contextlib.ExitStack() as stack:
            for descriptor in reading:
                stack.callback(os.close, descriptor)
            files = [_file(json.dumps(dict(what)).encode()), _file(stdin)]
            head = json.dumps({"id": self.jobs, "seconds": seconds}).encode() + b"\n"
            try:
                socket.send_fds(self.channel, [head], [*files, *writing])
            except OSError as exc:
                self._restart(str(exc))
            finally:
                for descriptor in (*files, *writing):
                    os.close(descriptor)
            return self._collect(reading, time.monotonic() + seconds + GRACE_SECONDS)

    def _collect(self, reading: list[int], deadline: float) -> Ended:
        """Read all pipes until the box reports the program's end, then what is left in the pipes."""
        kept = {descriptor: bytearray() for descriptor in reading}
        most = self.limits.output_kb * 1024
        flooded, answer = False, b""
        with selectors.DefaultSelector() as selector:
            for descriptor in reading:
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            selector.register(self.channel, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    self._restart("no answer in time")
                for key, _ in ready:
                    if key.fd == self.channel.fileno():
                        part = self.channel.recv(4096)
                        if not part:
                            self._restart("it ended")
                        answer += part
                    elif not self._read(key.fd, kept[key.fd]):
                        selector.unregister(key.fd)
                if not flooded and any(len(kept[fd]) > most for fd in (reading[0], reading[2])):
                    flooded = True
                    self.channel.sendall(b"stop\n")
                for fd in (reading[0], reading[2]):
                    del kept[fd][most + 1 :]
                del kept[reading[1]][:-ERRORS_BYTES]
        for descriptor in reading:  # the end was reported before the last output was read
            while len(kept[descriptor]) <= most and self._read(descriptor, kept[descriptor]):
                pass
        output, errors, values = (bytes(kept[descriptor]) for descriptor in reading)
        flooded |= max(len(output), len(values)) > most
        end = json.loads(answer)
        late = end["late"] and not flooded
        return Ended(
            end["code"], late, flooded, output[:most], errors[-ERRORS_BYTES:], values[:most], end["cpu"]
        )

    @staticmethod
    def _read(descriptor: int, into: bytearray) -> bool:
        """Read from a pipe; return False at its end, or if it is empty for now."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        into += data
        return bool(data)

    def _answer(self) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            part = self.channel.recv(4096)
            if not part:
                raise BoxProblem("it ended")
            line += part
        return json.loads(line)

    def _restart(self, why: str) -> None:
        self.close()
        self._start()
        raise BoxProblem(f"the box broke ({why}) and was started again")

    def close(self) -> None:
        """Kill the box with all processes in it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.channel.close()

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _file(data: bytes) -> int:
    """Return a descriptor of a nameless file from which ``data`` can be read."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("job", os.MFD_CLOEXEC)
        _write(descriptor, data)
        try:  # open it again, read-only
            return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(descriptor)
    with tempfile.TemporaryFile() as file:
        _write(file.fileno(), data)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        return os.dup(file.fileno())


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _bubblewrap(paths: Sequence[str]) -> list[str]:
    """Return the arguments that close the box as ``inside/view.py`` does."""
    arguments = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"]
    arguments += [
        "--cap-drop",
        "ALL",
        "--cap-add",
        "CAP_SYS_ADMIN",
        "--uid",
        "0",
        "--gid",
        "0",
        "--dev",
        "/dev",
    ]
    for path in sorted({os.path.realpath(path) for path in paths}):
        arguments += ["--ro-bind", path, path]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            arguments += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
    return [*arguments, "--dir", "/box", "--remount-ro", "/", "--chdir", "/"]
