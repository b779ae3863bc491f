"""System calls of Linux that Python's standard library lacks, by ctypes; each raises OSError.

Numbers of calls that libc has no function for are the same on all architectures since Linux 5.1; ``pivot_root`` is
older and is looked up by machine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2

PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446

LANDLOCK_READ = 1 | 4 | 8  # execute, read file, read folder
LANDLOCK_ALL = (1 << 13) - 1  # version 1: every right on files
LANDLOCK_SINCE = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}  # refer, truncate, ioctl on devices
LANDLOCK_TCP = 1 | 2  # bind, connect; since version 4
LANDLOCK_SCOPES = 1 | 2  # abstract unix sockets, signals; since version 6

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(number: int, what: str, *arguments: int | ctypes.Array | ctypes.Structure | bytes | None) -> int:
    values = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *values), what)


def unshare(flags: int) -> None:
    """Leave the namespaces of these kinds for new ones."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system with the system call ``mount``."""
    text = [None if value is None else value.encode() for value in (source, target, kind)]
    _checked(_libc.mount(*text, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount and all below it."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def make_read_only(target: str, recursive: bool = True) -> None:
    """Forbid writing, devices and set-user-id below a mount (Linux 5.12)."""
    on = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    attributes = struct.pack("=QQQQ", on, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    what = f"mount_setattr {target}"
    _call(MOUNT_SETATTR, what, AT_FDCWD, target.encode(), flags, attributes, len(attributes))


def pivot_root(new: str, old: str) -> None:
    """Make ``new`` the root; the old root is then mounted at ``old``, which lies below ``new``.

    Raises:
        OSError: the call fails, or its number is unknown for this machine.
    """
    number = PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(38, f"pivot_root: not known for {platform.machine()}")
    _call(number, "pivot_root", new.encode(), old.encode())


def control(option: int, value: int = 0) -> None:
    """Call prctl(2) with a number."""
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def drop_capabilities() -> None:
    """Give up every capability in all sets of this process."""
    header = struct.pack("=Ii", 0x20080522, 0)  # version 3, this process
    _checked(_libc.capset(header, bytes(24)), "capset")


def install_filter(program: bytes) -> None:
    """Make a seccomp program decide on every further system call; needs no-new-privileges."""
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: number of instructions of 8 bytes, their address
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    holder = ctypes.create_string_buffer(head, len(head))
    address = ctypes.c_ulong(ctypes.addressof(holder))
    zero = ctypes.c_ulong(0)
    mode = ctypes.c_ulong(SECCOMP_MODE_FILTER)
    _checked(_libc.prctl(PR_SET_SECCOMP, mode, address, zero, zero), "seccomp")


def landlock_version() -> int:
    """Return the kernel's version of Landlock's interface; 0 if the kernel lacks it or it is switched off."""
    return max(0, _libc.syscall(ctypes.c_long(LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def landlock(readable: list[str], writable: list[str]) -> int:
    """Return a ruleset, for ``enter_landlock``, that allows reading ``readable``, everything in ``writable``, no TCP.

    Args:
        readable: files and folders; those that do not exist are left out.
        writable: folders.
    """
    version = landlock_version()
    files = LANDLOCK_ALL
    for since, right in LANDLOCK_SINCE.items():
        files |= right if version >= since else 0
    attributes = struct.pack("=Q", files)
    if version >= 4:
        attributes += struct.pack("=Q", LANDLOCK_TCP)
    if version >= 6:
        attributes += struct.pack("=Q", LANDLOCK_SCOPES)
    ruleset = _call(LANDLOCK_CREATE, "landlock", attributes, len(attributes), 0)
    for rights, paths in ((LANDLOCK_READ, readable), (files, writable)):
        for path in paths:
            try:
                below = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            allowed = rights if os.path.isdir(path) else rights & ~8 & (1 | 2 | 4 | (1 << 14) | (1 << 15))
            rule = struct.pack("=Qi", allowed & files, below)
            _call(LANDLOCK_ADD, f"landlock {path}", ruleset, 1, rule, 0)
            os.close(below)
    return ruleset


def enter_landlock(ruleset: int) -> None:
    """Restrict this process and all that it will start by a ruleset; needs no-new-privileges."""
    _call(LANDLOCK_RESTRICT, "landlock_restrict_self", ruleset, 0)
