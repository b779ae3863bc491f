"""Jobs: a fork for each, confined before the program runs, and killed with all processes that it started.

A job is a line and five descriptors: what to do (a file in memory), the program's stdin, stdout and stderr, and the
pipe for values. The answer is a line: how the process ended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time

import python_tests

LINUX = sys.platform.startswith("linux")
DESCRIPTORS = 5
WATCH_SECONDS = 0.002  # polling interval where the platform has no pidfd
MIB = 2**20

if LINUX:
    import seccomp
    import syscalls
    import view


class Box:
    """A box that confines programs, prepared once.

    Args:
        channel: the socket to the engine.
        order: ``tier``, ``readable``, ``memory_mb``, ``disk_mb``, ``processes``, ``executing``.

    Raises:
        OSError: the machine cannot do what the tier promises.
    """

    def __init__(self, channel: socket.socket, order: dict) -> None:
        self.channel, self.order = channel, order
        self.apart = order["tier"] in ("namespaces", "bubblewrap")
        self.disk = self.apart and order["disk_mb"] > 0
        self.version = syscalls.landlock_version() if LINUX else 0
        self.filtered = LINUX and seccomp.available()
        self.ruled = bool(self.version) and order["tier"] != "limits"
        # Rules refer to existing folders: a new disk for each program needs new rules each time.
        self.rules = self._rules() if self.ruled and not self.disk else -1
        self.myself = os.pidfd_open(os.getpid()) if self.apart else -1
        self.unsettled = False  # whether children would start in the last job's process tree
        many = self.apart and order["processes"] > 1
        self.program = b""
        if self.filtered:
            self.program = seccomp.program(bool(self.disk), order["executing"], many)
        if order["tier"] != "limits" and not self.filtered:
            raise OSError("there is no seccomp, or no filter for this processor")
        if order["tier"] == "landlock" and not self.version:
            raise OSError("there is no Landlock in this kernel, or it is switched off")

    def _rules(self) -> int:
        writable = [view.WORK] if self.disk else []
        return syscalls.landlock(
            self.order["readable"] + ["/dev/null", "/dev/zero", "/dev/urandom"], writable
        )

    def serve(self) -> None:
        """Run jobs until the socket ends."""
        gc.collect()
        gc.freeze()  # a fork's collector then leaves these pages shared
        self._tell({"ready": True, "landlock": self.version, "seccomp": self.filtered})
        while True:
            line, descriptors, _, _ = socket.recv_fds(self.channel, 4096, DESCRIPTORS)
            if not line:
                return
            if len(descriptors) == DESCRIPTORS:  # otherwise a stop that came after its job had ended
                self._do(json.loads(line.splitlines()[-1]), descriptors)

    def _tell(self, message: dict) -> None:
        self.channel.sendall(json.dumps(message).encode() + b"\n")

    def _do(self, job: dict, descriptors: list[int]) -> None:
        start = time.monotonic()
        if self.apart:
            if self.unsettled:
                syscalls.join(self.myself, syscalls.CLONE_NEWPID)
            syscalls.unshare(syscalls.CLONE_NEWPID)
            self.unsettled = True
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            self._run(job, descriptors, parent)
        for descriptor in descriptors:
            os.close(descriptor)
        late = not self._wait(child, start + job["seconds"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        cpu = used.ru_utime + used.ru_stime
        self._tell({"id": job["id"], "code": code, "late": late, "cpu": cpu})

    def _wait(self, child: int, deadline: float) -> bool:
        """Return whether a process ended by itself before its time was over and before the engine said stop."""
        if not hasattr(os, "pidfd_open"):
            while time.monotonic() < deadline and not select.select([self.channel], [], [], WATCH_SECONDS)[0]:
                if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                    return True
            return False
        ended = os.pidfd_open(child)
        try:
            watched = select.poll()
            watched.register(ended, select.POLLIN)
            watched.register(self.channel, select.POLLIN)
            ready = watched.poll(max(0.0, deadline - time.monotonic()) * 1000)
            return any(descriptor == ended for descriptor, _ in ready)
        finally:
            os.close(ended)

    def _run(self, job: dict, descriptors: list[int], parent: int) -> None:
        """Confine the fork and run the program; never returns."""
        code = 70  # not the program's fault
        try:
            self._confine(job, descriptors, parent)
            code = 1
            python_tests.run(job["what"])
            code = 0
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else exc.code is not None
            if code is True:  # sys.exit("message")
                print(exc.code, file=sys.stderr)
        except BaseException as exc:
            sys.excepthook(type(exc), exc, exc.__traceback__)
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
            with contextlib.suppress(BaseException):
                sys.stderr.flush()
            os._exit(int(code) & 0xFF)

    def _confine(self, job: dict, descriptors: list[int], parent: int) -> None:
        os.setsid()
        if self.disk:
            view.fresh_disk(self.order["disk_mb"])
        elif self.apart:
            os.chdir("/")
        # The job is read before the descriptors get their places; 3 is the pipe for values.
        with os.fdopen(os.dup(descriptors[0]), "rb") as file:
            job["what"] = json.loads(file.read())
        rules = self._rules() if self.ruled and self.disk else os.dup(self.rules) if self.ruled else -1
        high = [os.dup(descriptor) for descriptor in descriptors[1:]]
        for place, descriptor in enumerate(high):
            os.dup2(descriptor, place)
        self._limit(job["seconds"])
        if LINUX:
            view.end_with_parent(parent, apart=self.apart)
            syscalls.control(syscalls.PR_SET_NO_NEW_PRIVS, 1)
            if self.apart or os.geteuid() == 0:
                syscalls.drop_capabilities()
            if rules >= 0:
                syscalls.enter_landlock(rules)
        os.closerange(4, 4096)
        if self.filtered:
            syscalls.install_filter(seccomp.for_process(self.program, os.getpid()))

    def _limit(self, seconds: float) -> None:
        order = self.order
        limits = {
            "AS": order["memory_mb"] * MIB,
            "CPU": int(seconds) + 2,
            "CORE": 0,
            "FSIZE": order["disk_mb"] * MIB if self.disk else 0,
            "NOFILE": 64,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
        }
        if (
            self.apart
        ):  # counted in this box alone, which itself has two; elsewhere all processes of the user count
            limits["NPROC"] = 2 + order["processes"] + (order["threads"] if order["processes"] == 1 else 0)
        for name, value in limits.items():
            if (number := getattr(resource, f"RLIMIT_{name}", None)) is not None:
                hard = resource.getrlimit(number)[1]
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(number, (value, value))
