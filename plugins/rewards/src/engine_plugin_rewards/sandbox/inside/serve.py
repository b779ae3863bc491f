"""Jobs: a fork for each, confined before the program runs, and killed when its time is over.

A job is a message and five descriptors: what to do (a file in memory), the program's stdin, stdout and stderr, and the
pipe for values. The answer is a message: how the process ended. A message without descriptors says stop.
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

import pytest_stub
import python_tests
import seccomp
import sessions
import syscalls
import view

DESCRIPTORS = 5
MIB = 2**20
OUTER_PROCESSES = 1  # of the box, which count as well: that which forks for jobs


class Box:
    """A box that confines programs, prepared once.

    Args:
        channel: the socket to the engine.
        order: ``tier``, ``readable``, ``memory_mb``, ``disk_mb``, ``processes``.

    Raises:
        OSError: the machine cannot do what the tier promises.
    """

    def __init__(self, channel: socket.socket, order: dict) -> None:
        self.channel, self.order = channel, order
        self.disk = order["tier"] == "namespaces" and order["disk_mb"] > 0
        version = syscalls.landlock_version()
        self.filtered = seccomp.available()
        self.ruled = bool(version) and order["tier"] != "limits"
        # Rules refer to existing folders: a new disk for each program needs new rules each time.
        self.rules = self._rules() if self.ruled and not self.disk else -1
        many = order["processes"] > 1
        self.program = seccomp.program(self.disk, many) if self.filtered else b""
        if many and order["tier"] != "namespaces":  # processes could leave the group that is killed
            raise OSError("several processes need the tier namespaces")
        if order["tier"] != "limits" and not self.filtered:
            raise OSError("there is no seccomp, or no filter for this processor")
        if order["tier"] == "landlock" and not version:
            raise OSError("there is no Landlock in this kernel, or it is switched off")

    def _rules(self) -> int:
        writable = [view.WORK, "/dev/null"] if self.disk else []
        return syscalls.landlock(
            self.order["readable"] + ["/dev/null", "/dev/zero", "/dev/urandom"], writable
        )

    def serve(self) -> None:
        """Run jobs until the socket ends."""
        gc.collect()
        gc.freeze()  # a fork's collector then leaves these pages shared
        self.channel.sendall(b'{"ready": true}')
        while True:
            message, descriptors, _, _ = socket.recv_fds(self.channel, 4096, DESCRIPTORS)
            if not message:
                return
            if descriptors:  # otherwise a stop that came after its job had ended
                self._do(json.loads(message), descriptors)

    def _do(self, job: dict, descriptors: list[int]) -> None:
        deadline = time.monotonic() + job["seconds"]
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            self._run(job, descriptors, parent)
        for descriptor in descriptors:
            os.close(descriptor)
        late = not self._wait(child, deadline)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self.channel.sendall(json.dumps({"code": code, "late": late}).encode())

    def _wait(self, child: int, deadline: float) -> bool:
        """Return whether a process ended by itself before its time was over and before the engine said stop."""
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
            what = job["what"]
            if what["kind"] in sessions.KINDS:
                sessions.KINDS[what["kind"]](what)
            else:
                sys.meta_path.append(pytest_stub.Finder())
                python_tests.run(what)
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
        # The job is read before the descriptors get their places; 3 is the pipe for values.
        with os.fdopen(os.dup(descriptors[0]), "rb") as file:
            job["what"] = json.loads(file.read())
        rules = self._rules() if self.ruled and self.disk else os.dup(self.rules) if self.ruled else -1
        high = [os.dup(descriptor) for descriptor in descriptors[1:]]
        for place, descriptor in enumerate(high):
            os.dup2(descriptor, place)
        self._limit(job["seconds"])
        view.end_with_parent(parent)
        syscalls.control(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        if self.order["tier"] == "namespaces" or os.geteuid() == 0:
            syscalls.drop_capabilities()
        if rules >= 0:
            syscalls.enter_landlock(rules)
        os.closerange(4, 4096)
        if self.filtered:
            syscalls.install_filter(seccomp.for_process(self.program, os.getpid()))

    def _limit(self, seconds: float) -> None:
        limits = {
            resource.RLIMIT_AS: self.order["memory_mb"] * MIB,
            resource.RLIMIT_CPU: int(seconds) + 2,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: self.order["disk_mb"] * MIB if self.disk else 0,
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        if self.order["processes"] > 1:
            limits[resource.RLIMIT_NPROC] = self.order["processes"] + OUTER_PROCESSES
        for number, value in limits.items():
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))
