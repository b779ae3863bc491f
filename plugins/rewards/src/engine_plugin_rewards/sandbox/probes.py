"""Attacks of hostile programs, and the tier from which on each one fails.

A probe is a program that prints ``BREACH`` if its attack succeeds. The targets lie outside of the box and belong to
this process (``Bait``), which checks at the end that they are untouched. The first eight (``ESSENTIAL``) decide on
every machine which tiers are in force; the others run in the tests. docs/reference/sandbox.md is
made of this list.
"""

from __future__ import annotations

import contextlib
import json
import os
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
import ctypes, json, os, signal, socket, sys, time
bait = json.loads(input())
libc = ctypes.CDLL(None, use_errno=True)
def breach(*what):
    print("BREACH", *what, flush=True)
def attempt(f, *arguments):
    try:
        return breach(f.__name__, repr(f(*arguments))[:200])
    except (OSError, MemoryError, PermissionError) as exc:
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


READ = 'attempt(lambda: open(bait["file"]).read())\nattempt(lambda: os.listdir(bait["folder"]))'
WRITE = """
for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDONLY | os.O_TRUNC):
    attempt(os.open, bait["file"], flags)
attempt(os.open, bait["folder"] + "/new", os.O_CREAT | os.O_WRONLY)
for f, arguments in (
    (os.truncate, (bait["file"], 0)), (os.remove, (bait["file"],)), (os.chmod, (bait["file"], 0o777)),
    (os.rename, (bait["file"], bait["file"] + "2")), (os.mkdir, (bait["folder"] + "/d",)),
    (os.link, (bait["file"], "copy")),
):
    attempt(f, *arguments)
"""
TCP = """
def connect():
    socket.create_connection(("127.0.0.1", bait["tcp"]), timeout=1).sendall(b"BREACH")
def listen():
    socket.create_server(("127.0.0.1", 0))
attempt(connect)
attempt(listen) if bait["apart"] is False else None
"""
UDP = """
def send():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.sendto(b"BREACH", ("127.0.0.1", bait["udp"]))
attempt(send)
"""
SIGNAL = """
for pid in {bait["pid"], os.getppid(), -1} - {0}:
    attempt(os.kill, pid, 0)
import fcntl
r, w = os.pipe()
for command in (fcntl.F_SETOWN, 15, 10):
    attempt(fcntl.fcntl, r, command, bait["pid"])
attempt(signal.pidfd_send_signal, 0, 0)
"""
FORK = """
children = 0
while children < 200:
    try:
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        children += 1
    except OSError as exc:
        print("refused after", children, exc)
        break
if children > bait["processes"]:
    breach(children)
"""
ENVIRONMENT = """
if os.environ:
    breach(dict(os.environ))
for pid in (bait["pid"], os.getppid(), "self"):
    attempt(lambda: open(f"/proc/{pid}/environ", "rb").read() or 1 / 0)
"""

ESSENTIAL = (
    Probe("read a file or a folder outside of the box", "landlock", "Landlock; not mounted", READ),
    Probe(
        "write, change or delete a file outside of it", "landlock", "Landlock, seccomp; not mounted", WRITE
    ),
    Probe(
        "open a TCP connection or listen", "landlock", "seccomp, Landlock; a network without interfaces", TCP
    ),
    Probe("send UDP", "landlock", "seccomp; a network without interfaces", UDP),
    Probe(
        "signal the engine or its own parent",
        "landlock",
        "seccomp, Landlock; a separate process tree",
        SIGNAL,
    ),
    Probe(
        "allocate 2 GB",
        "limits",
        "a limit of address space",
        "attempt(lambda: len(bytearray(2_000_000_000)))",
    ),
    Probe("fork without end", "landlock", "seccomp; a limit of processes", FORK),
    Probe("read the engine's environment", "landlock", "an empty one; Landlock; no /proc", ENVIRONMENT),
)

FURTHER = (
    Probe(
        "follow a symbolic link out of the box",
        "landlock",
        "Landlock; not mounted",
        """
try:
    os.symlink(bait["file"], "link")
except OSError:
    pass
for path in ("link", "../../../../../.." + bait["file"], "/proc/self/root" + bait["file"], "/proc/self/cwd/link"):
    attempt(lambda: open(path).read())
""",
    ),
    Probe(
        "look at other processes in /proc",
        "landlock",
        "Landlock; no /proc",
        """
attempt(os.listdir, "/proc")
for pid in (1, bait["pid"], os.getppid(), "self"):
    for name in ("cmdline", "maps", "mem", "fd", "status"):
        attempt(os.open, f"/proc/{pid}/{name}", os.O_RDONLY)
""",
    ),
    Probe(
        "leave a process behind with setsid and a double fork",
        "landlock",
        "seccomp; all die with the first",
        """
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(1)
            time.sleep(600)
        os._exit(0)
    if bait["processes"] == 1:
        breach()
except OSError as exc:
    print("refused:", exc)
""",
    ),
    Probe(
        "start another program",
        "landlock",
        "seccomp",
        """
for path in ("/bin/sh", "/usr/bin/env", sys.executable, "/lib64/ld-linux-x86-64.so.2"):
    attempt(os.execv, path, [path, "-c", "echo BREACH"])
attempt(os.posix_spawn, "/bin/sh", ["sh", "-c", "echo BREACH"], {})
""",
    ),
    Probe(
        "trace a process, read its memory",
        "landlock",
        "seccomp, Landlock",
        """
if os.uname().machine == "x86_64":
    call(101, 16, bait["pid"], 0, 0)
    call(101, 16, os.getppid(), 0, 0)
    call(310, bait["pid"], 0, 0, 0, 0, 0)
    call(434, bait["pid"], 0)
""",
    ),
    Probe(
        "keyrings, io_uring, BPF, perf, userfaultfd, memfd",
        "landlock",
        "seccomp",
        """
if os.uname().machine == "x86_64":
    for number in (248, 249, 250, 425, 426, 427, 321, 298, 323, 319, 447, 304, 303):
        call(number, 0, 0, 0, 0, 0)
""",
    ),
    Probe(
        "new namespaces, mounts, chroot, kernel modules, reboot",
        "landlock",
        "seccomp, no capabilities",
        """
if os.uname().machine == "x86_64":
    for flags in (0x10000000, 0x20000, 0x40000000):
        call(272, flags)
        call(56, flags | 17, 0, 0, 0, 0)
    for number in (165, 166, 155, 161, 308, 175, 313, 169, 428, 429, 430, 442, 435, 180):
        call(number, 0, 0, 0, 0, 0)
""",
    ),
    Probe(
        "unix sockets, abstract and named",
        "landlock",
        "seccomp, Landlock; a separate network",
        """
def abstract():
    s = socket.socket(socket.AF_UNIX)
    s.connect(chr(0) + bait["abstract"])
    s.sendall(b"BREACH")
def datagram():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    a.sendto(b"BREACH", chr(0) + bait["abstract"])
def stream():
    a, b = socket.socketpair()
    a.sendto(b"BREACH", chr(0) + bait["abstract"])
for f in (abstract, datagram, stream):
    attempt(f)
""",
    ),
    Probe(
        "leave something in System V or POSIX shared memory",
        "landlock",
        "seccomp",
        """
if os.uname().machine == "x86_64":
    for number in (29, 64, 68, 240):
        call(number, 4711, 4096, 0o1666)
attempt(os.open, "/dev/shm/left", os.O_CREAT | os.O_RDWR)
""",
    ),
    Probe(
        "write to descriptors that it inherited",
        "limits",
        "all but its own four are closed",
        """
for number in range(4, 4096):
    attempt(os.fstat, number)
for number in (0,):
    attempt(os.write, number, b"BREACH")
""",
    ),
    Probe(
        "continue after its time limit, ignoring every signal",
        "limits",
        "killed by the box",
        """
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
while True:
    pass
""",
        0.3,
    ),
    Probe("stop itself, sleep, wait for ever", "limits", "killed by the box", "time.sleep(10 ** 6)", 0.3),
    Probe("print without end", "limits", "killed by the box", "while True:\n    print('x' * 10000)"),
    Probe(
        "set the clock, the host name, its limits or its priority",
        "landlock",
        "seccomp, no capabilities",
        """
import resource
attempt(time.clock_settime, time.CLOCK_REALTIME, time.time())
attempt(socket.sethostname, socket.gethostname())
attempt(os.setpriority, os.PRIO_PROCESS, 0, -20)
attempt(os.setuid, 0)
try:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    breach()
except (OSError, ValueError) as exc:
    print("refused:", exc)
""",
    ),
    Probe(
        "start threads without end",
        "limits",
        "a limit of address space",
        """
import threading
stop = threading.Event()
started = 0
try:
    while started < 5000:
        threading.Thread(target=stop.wait, daemon=True).start()
        started += 1
except (RuntimeError, MemoryError) as exc:
    print("refused after", started, exc)
stop.set()
if started >= 5000:
    breach()
""",
    ),
    Probe(
        "fill the disk, use up inodes",
        "landlock",
        "nothing to write to; a small disk in memory",
        """
written = files = 0
try:
    with open("big", "wb") as file:
        while written < 200_000_000:
            written += file.write(b"x" * 1_000_000)
            file.flush()
except OSError as exc:
    print("refused after", written, exc)
try:
    os.remove("big")
except OSError:
    pass
try:
    while files < 100_000:
        os.mkdir(f"f{files}")
        files += 1
except OSError as exc:
    print("refused after", files, exc)
if written >= 200_000_000 or files >= 100_000:
    breach(written, files)
""",
    ),
    Probe(
        "leave a file for the next program, delete its own folder",
        "landlock",
        "each has a separate folder",
        """
import glob
if glob.glob("left*"):
    breach("left by another")
try:
    open("left", "w").write("x")
    os.symlink("/", "left2")
    here = os.getcwd()
    os.chdir("/")
    os.rmdir(here)
    breach("folder")
except OSError as exc:
    print("refused:", exc)
""",
    ),
)

PROBES = ESSENTIAL + FURTHER


class Bait:
    """The targets of the probes; all belong to this process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "secret"
        self.file.write_text(SECRET)
        self.file.chmod(0o644)
        folder.chmod(0o755)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.unix = None
        self.name = f"engine-probe-{os.getpid()}-{id(self)}"
        if hasattr(os, "memfd_create"):  # Linux: sockets without a file
            self.unix = socket.socket(socket.AF_UNIX)
            self.unix.bind(f"\0{self.name}")
            self.unix.listen()

    def described(self, box: Box) -> bytes:
        """Return the targets' addresses as JSON for the program."""
        return json.dumps(
            {
                "file": str(self.file),
                "folder": str(self.folder),
                "tcp": self.tcp.getsockname()[1],
                "udp": self.udp.getsockname()[1],
                "abstract": self.name,
                "pid": os.getpid(),
                "processes": box.limits.processes,
                "apart": box.tier in ("namespaces", "bubblewrap"),
            }
        ).encode()

    def touched(self) -> str:
        """Return how a program in the box has reached the targets; empty if it has not."""
        found = []
        if (
            sorted(path.name for path in self.folder.iterdir()) != ["secret"]
            or self.file.read_text() != SECRET
        ):
            found.append("files changed")
        for name, receiver in (("TCP", self.tcp), ("UDP", self.udp), ("unix socket", self.unix)):
            if receiver is None:
                continue
            receiver.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                receiver.recvfrom(100) if name == "UDP" else receiver.accept()[0].close()
                found.append(f"{name} arrived")
        return ", ".join(found)

    def close(self) -> None:
        """Close the sockets."""
        for one in (self.tcp, self.udp, self.unix):
            if one is not None:
                one.close()


@contextlib.contextmanager
def bait() -> Iterator[Bait]:
    """Yield targets for probes and remove them afterwards."""
    with tempfile.TemporaryDirectory(prefix="engine-probe-") as folder:
        laid = Bait(Path(folder))
        try:
            yield laid
        finally:
            laid.close()


def run(probe: Probe, box: Box, laid: Bait) -> tuple[str, Ended]:
    """Run a probe; return its success (empty: none) and how it ended."""
    what = {"kind": "stdin", "source": PROLOGUE + probe.source}
    ended = box.run(what, laid.described(box) + b"\n", probe.seconds)
    breaches = [line for line in ended.output.splitlines() if line.startswith(BREACH)]
    got = b"; ".join(breaches[:3]).decode(errors="replace") or laid.touched()
    if not got and b"refused" not in ended.output and not (ended.late or ended.flooded) and ended.code:
        said = ended.errors.decode(errors="replace")[-300:].strip() or f"status {ended.code}"
        got = f"it ended before it tried anything: {said}"
    return got, ended
