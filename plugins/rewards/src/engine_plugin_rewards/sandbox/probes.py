"""Attacks of hostile programs, and the tier from which on each one fails.

A probe is a program that prints ``BREACH`` if its attack succeeds. The targets lie outside of the box and belong to
this process (``Bait``), which checks at the end that they are untouched. On every machine the probes decide which tiers
are in force. docs/reference/sandbox.md is made of this list.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_plugin_rewards.sandbox.box import Box, Ended

BREACH = b"BREACH"
SECRET = "what the box must not see"
PROLOGUE = """
import ctypes, fcntl, json, os, resource, signal, socket, sys, time
bait = json.loads(input())
libc = ctypes.CDLL(None, use_errno=True)
def breach(*what):
    print("BREACH", *what, flush=True)
def attempt(f, *arguments):
    try:
        return breach(f.__name__, repr(f(*arguments))[:200])
    except (OSError, MemoryError, ValueError) as exc:
        print("refused:", exc)
def call(number, *arguments):
    if libc.syscall(number, *arguments) >= 0 or ctypes.get_errno() not in (1, 13, 38):
        breach("system call", number, ctypes.get_errno())
"""


@dataclass(frozen=True)
class Probe:
    """An attack.

    Attributes:
        name: the attack, in the words of the documentation.
        tier: the lowest tier that promises to stop it.
        how: the mechanisms that stop it.
        source: the program after ``PROLOGUE``.
        seconds: time limit.
    """

    name: str
    tier: str
    how: str
    source: str
    seconds: float = 2.0


READ = """
if os.environ:
    breach(dict(os.environ))
for path in (bait["file"], "/proc/self/root" + bait["file"], "/proc/self/environ", "/proc/1/status"):
    attempt(lambda: open(path, "rb").read())
for path in (bait["folder"], "/proc"):
    attempt(os.listdir, path)
"""
WRITE = """
for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDONLY | os.O_TRUNC):
    attempt(os.open, bait["file"], flags)
for path in (bait["folder"] + "/new", "/dev/shm/left"):
    attempt(os.open, path, os.O_CREAT | os.O_WRONLY)
for f, arguments in (
    (os.truncate, (bait["file"], 0)), (os.remove, (bait["file"],)), (os.chmod, (bait["file"], 0o777)),
    (os.rename, (bait["file"], bait["file"] + "2")), (os.mkdir, (bait["folder"] + "/d",)),
    (os.link, (bait["file"], "copy")),
):
    attempt(f, *arguments)
"""
NETWORK = """
def tcp():
    socket.create_connection(("127.0.0.1", bait["tcp"]), timeout=1)
def unix():
    socket.socket(socket.AF_UNIX).connect(chr(0) + bait["unix"])
def pair(kind):
    socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b"BREACH", chr(0) + bait["unix"])
attempt(tcp)
attempt(unix)
attempt(pair, socket.SOCK_STREAM)
attempt(pair, socket.SOCK_DGRAM)
"""
SIGNAL = """
for pid in {bait["pid"], os.getppid(), -1} - {0}:
    attempt(os.kill, pid, 0)
r, w = os.pipe()
for command in (fcntl.F_SETOWN, 15, 10):
    attempt(fcntl.fcntl, r, command, bait["pid"])
attempt(signal.pidfd_send_signal, 0, 0)
"""
START = """
def fork():
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
attempt(fork)
for path in ("/bin/sh", "/usr/bin/env", sys.executable, "/lib64/ld-linux-x86-64.so.2"):
    attempt(os.execv, path, [path, "-c", "echo BREACH"])
attempt(os.posix_spawn, "/bin/sh", ["sh", "-c", "echo BREACH"], {})
"""
SYSTEM_CALLS = """
if os.uname().machine == "x86_64":
    call(101, 16, os.getppid(), 0, 0)  # ptrace
    call(310, bait["pid"], 0, 0, 0, 0, 0)  # process_vm_readv
    for flags in (0x10000000, 0x20000, 0x40000000):  # unshare and clone: users, mounts, network
        call(272, flags)
        call(56, flags | 17, 0, 0, 0, 0)
    for number in (29, 64, 68, 240):  # shmget, semget, msgget, mq_open
        call(number, 4711, 4096, 0o1666)
    for number in (
        *(165, 166, 155, 161, 308, 428, 429, 430, 442),  # mounts, chroot, setns
        *(175, 313, 169, 180, 435),  # modules, reboot, nfsservctl, clone3
        *(248, 249, 250, 425, 426, 427, 434),  # keyrings, io_uring, pidfd_open
        *(321, 298, 323, 319, 447, 303, 304),  # BPF, perf, userfaultfd, memfd, file handles
    ):
        call(number, 0, 0, 0, 0, 0)
attempt(time.clock_settime, time.CLOCK_REALTIME, time.time())
attempt(socket.sethostname, socket.gethostname())
attempt(os.setpriority, os.PRIO_PROCESS, 0, -20)
attempt(os.setuid, 0)
attempt(resource.setrlimit, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
"""
DESCRIPTORS = """
attempt(os.write, 0, b"BREACH")
for number in range(4, 4096):
    attempt(os.fstat, number)
"""
TIME = """
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
while True:
    pass
"""
MEMORY = "attempt(lambda: len(bytearray(2_000_000_000)))"
OUTPUT = "while True:\n    print('x' * 10000)"

PROBES = (
    Probe(
        "read files, processes or the environment", "landlock", "Landlock, an empty one; not mounted", READ
    ),
    Probe("write, change or delete files", "landlock", "Landlock, seccomp; not mounted", WRITE),
    Probe(
        "reach a socket by TCP or on the machine",
        "landlock",
        "seccomp, Landlock; a separate network",
        NETWORK,
    ),
    Probe("signal other processes", "landlock", "seccomp, Landlock; a separate process tree", SIGNAL),
    Probe("start a process or a program", "landlock", "seccomp", START),
    Probe("make system calls that are not listed", "landlock", "seccomp, no capabilities", SYSTEM_CALLS),
    Probe("use descriptors that it inherited", "limits", "all but its own four are closed", DESCRIPTORS),
    Probe("allocate 2 GB", "limits", "a limit of address space", MEMORY),
    Probe("print without end", "limits", "killed by the box", OUTPUT),
    Probe("continue after its time, ignoring every signal", "limits", "killed by the box", TIME, 0.2),
)


class Bait:
    """The targets of the probes; all belong to this process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "secret"
        self.file.write_text(SECRET)
        self.file.chmod(0o644)
        folder.chmod(0o755)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind("")  # Linux chooses a name without a file
        self.unix.listen()
        self.sockets = (self.tcp, self.unix)

    def described(self) -> bytes:
        """Return the targets' addresses as JSON for the program."""
        described = {
            "file": str(self.file),
            "folder": str(self.folder),
            "tcp": self.tcp.getsockname()[1],
            "unix": self.unix.getsockname()[1:].decode(),
            "pid": os.getpid(),
        }
        return json.dumps(described).encode() + b"\n"

    def touched(self) -> str:
        """Return how a program in the box has reached the targets; empty if it has not."""
        if [path.name for path in self.folder.iterdir()] != ["secret"] or self.file.read_text() != SECRET:
            return "files changed"
        return "a socket was reached" if select.select(self.sockets, [], [], 0)[0] else ""


@contextlib.contextmanager
def bait() -> Iterator[Bait]:
    """Yield targets for probes and remove them afterwards."""
    with tempfile.TemporaryDirectory(prefix="engine-probe-") as folder:
        laid = Bait(Path(folder))
        try:
            yield laid
        finally:
            for one in laid.sockets:
                one.close()


def run(probe: Probe, box: Box, laid: Bait) -> tuple[str, Ended]:
    """Run a probe; return its success (empty: none) and how it ended."""
    what = {"kind": "stdin", "source": PROLOGUE + probe.source}
    ended = box.run(what, laid.described(), probe.seconds)
    breaches = [line for line in ended.output.splitlines() if line.startswith(BREACH)]
    got = b"; ".join(breaches[:3]).decode(errors="replace") or laid.touched()
    if not got and b"refused" not in ended.output and not (ended.late or ended.flooded):
        said = ended.errors.decode(errors="replace")[-300:].strip() or f"status {ended.code}"
        got = f"it ended before it tried anything: {said}"
    return got, ended
