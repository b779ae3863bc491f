"""Namespaces: a separate process tree, network and file system.

The file system holds the readable files, read-only, four devices, and an empty folder ``/box``, in which every program
gets a small disk in memory. It has no ``/proc``.
"""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import syscalls
from syscalls import MS_BIND, MS_NODEV, MS_NOSUID, MS_PRIVATE, MS_REC

APART = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWCGROUP
)
DEVICES = ("null", "zero", "random", "urandom")
LINKED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # links to usr/... on most systems
WORK = "/box"
OVERFLOW = 65534
"""User and group of a box when the engine is root."""


def enter(readable: list[str]) -> None:
    """Enter new namespaces; return in a new process, which is the first of its process tree.

    The calling process stays outside, waits, and ends as the new process does.

    Raises:
        OSError: the machine does not allow it.
    """
    # Root mounts the files first and then drops its identity; other users may mount only in a user namespace.
    root = os.geteuid() == 0
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    if root:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        _build(readable)
        _drop_identity()
    user, group = os.getuid(), os.getgid()
    syscalls.unshare(APART)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(descriptor, text.encode())
        os.close(descriptor)
    os.close(proc)
    if not root:
        _build(readable)
    first = os.fork()
    if first:
        _wait_for(first)
    end_with_parent(0)  # as it is seen from in here


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    syscalls.control(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


def _drop_identity() -> None:
    os.setgroups([])
    os.setresgid(OVERFLOW, OVERFLOW, OVERFLOW)
    os.setresuid(OVERFLOW, OVERFLOW, OVERFLOW)
    syscalls.control(syscalls.PR_SET_DUMPABLE, 1)  # otherwise /proc/self would still be root's
    syscalls.control(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # the change of user has cleared it


def _wait_for(process: int) -> None:
    os.closerange(0, 64)  # the channel ends when the box does
    _, status = os.waitpid(process, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _build(readable: list[str]) -> None:
    """Make a root with the listed files, read-only, and detach the old root."""
    syscalls.mount("none", "/", None, MS_REC | MS_PRIVATE)
    chosen = _outermost(readable)
    # Held open, because the new root is mounted over a folder that may contain them.
    opened = {path: os.open(path, os.O_PATH) for path in chosen}
    devices = {f"/dev/{name}": os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    proc = os.open("/proc", os.O_PATH)
    base = next(folder for folder in ("/tmp", "/mnt", "/var") if os.path.isdir(folder))
    syscalls.mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.chdir(base)
    for path, descriptor in {**opened, **devices}.items():
        target = Path(base + path)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):  # its path may be hidden now
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        syscalls.mount(f"/proc/self/fd/{descriptor}", str(target), None, MS_BIND | MS_REC)
        if path in opened:
            syscalls.make_read_only(str(target))
    for descriptor in (*opened.values(), *devices.values(), proc):
        os.close(descriptor)
    for name in LINKED:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{base}/{name}")
    os.makedirs(base + WORK, exist_ok=True)
    os.mkdir(base + "/.old")
    syscalls.pivot_root(base, base + "/.old")
    os.chdir("/")
    syscalls.unmount("/.old")
    os.rmdir("/.old")
    syscalls.make_read_only("/", recursive=False)


def _outermost(paths: list[str]) -> list[str]:
    """Return the existing paths, with links resolved, without paths below another one."""
    real = sorted({os.path.realpath(path) for path in paths if os.path.exists(path)})
    return [p for p in real if not any(p != other and p.startswith(other + "/") for other in real)]


def fresh_disk(size_mb: int) -> None:
    """Mount an empty ``/box`` for the next program and make it the current folder.

    Args:
        size_mb: MiB that it may hold, in at most 64 files for each.
    """
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC)
    options = f"size={size_mb}m,nr_inodes={64 * size_mb + 2},mode=700"
    syscalls.mount("tmpfs", WORK, "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir(WORK)
