"""The system calls that a program in the box may make: a list of allowed calls; all others are refused.

A seccomp filter is a program for the kernel's packet filter: it reads the number of the call and its arguments and
answers. It is assembled here, because the library for it (libseccomp) is no Python package and not on every machine.
An unlisted call fails with EPERM. ``clone3`` and ``openat2``, whose arguments a filter cannot read, and the calls that
set extended attributes fail with ENOSYS, so that programs do without them.
"""

from __future__ import annotations

import platform
import struct

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH of <linux/audit.h> by machine, and which of the two numbers below the machine uses."""

# Name, number on x86_64, number on aarch64. A test compares them with the kernel's headers.
PLAIN = """
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68; close 3 57;
close_range 436 436; fstat 5 80; stat 4 -; lstat 6 -; newfstatat 262 79; statx 332 291; lseek 8 62;
access 21 -; faccessat 269 48; faccessat2 439 439; readlink 89 -; readlinkat 267 78; getcwd 79 17;
chdir 80 49; fchdir 81 50; getdents64 217 61; getdents 78 -; dup 32 23; dup2 33 -; dup3 292 24;
pipe 22 -; pipe2 293 59; flock 73 32; ftruncate 77 46; fsync 74 82; fdatasync 75 83;
fadvise64 221 223; mmap 9 222; mprotect 10 226; munmap 11 215; mremap 25 216; madvise 28 233;
brk 12 214; msync 26 227; mincore 27 232; rt_sigaction 13 134; rt_sigprocmask 14 135;
rt_sigreturn 15 139; rt_sigtimedwait 128 137; rt_sigpending 127 136; rt_sigsuspend 130 133;
sigaltstack 131 132; pause 34 -; restart_syscall 219 128; nanosleep 35 101; clock_nanosleep 230 115;
clock_gettime 228 113; clock_getres 229 114; gettimeofday 96 169; time 201 -; times 100 153;
getrusage 98 165; getrlimit 97 163; sysinfo 99 179; uname 63 160; getpid 39 172; getppid 110 173;
gettid 186 178; getuid 102 174; geteuid 107 175; getgid 104 176; getegid 108 177; getresuid 118 148;
getresgid 120 150; getgroups 115 158; getpgrp 111 -; getpgid 121 155; getsid 124 156;
sched_yield 24 124; sched_getaffinity 204 123; sched_getparam 143 121; sched_getscheduler 145 120;
sched_get_priority_max 146 125; sched_get_priority_min 147 126; getcpu 309 168; getpriority 140 141;
getrandom 318 278; futex 202 98; set_robust_list 273 99; get_robust_list 274 100;
set_tid_address 218 96; rseq 334 293; arch_prctl 158 -; membarrier 324 283; exit 60 93;
exit_group 231 94; poll 7 -; ppoll 271 73; select 23 -; pselect6 270 72; epoll_create 213 -;
epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -; epoll_pwait 281 22; epoll_pwait2 441 441;
eventfd2 290 19; alarm 37 -; setitimer 38 103; getitimer 36 102; timerfd_create 283 85;
timerfd_settime 286 86; timerfd_gettime 287 87; sendto 44 206; recvfrom 45 207; sendmsg 46 211;
recvmsg 47 212; shutdown 48 210; getsockopt 55 209; getsockname 51 204; getpeername 52 205;
umask 95 166; statfs 137 43; fstatfs 138 44; sendfile 40 71
"""
WRITING = """
mkdir 83 -; mkdirat 258 34; rmdir 84 -; unlink 87 -; unlinkat 263 35; rename 82 -; renameat 264 38;
renameat2 316 276; link 86 -; linkat 265 37; symlink 88 -; symlinkat 266 36; chmod 90 -; fchmod 91 52;
fchmodat 268 53; truncate 76 45; fallocate 285 47; utimensat 280 88; utime 132 -;
copy_file_range 326 285; creat 85 -
"""
PROCESSES = """
fork 57 -; vfork 58 -; execve 59 221; wait4 61 260; waitid 247 95; kill 62 129; setpgid 109 154; getxattr 191 8;
lgetxattr 192 9; fgetxattr 193 10; listxattr 194 11; llistxattr 195 12; flistxattr 196 13
"""
RULED = """
open 2 -; openat 257 56; clone 56 220; prlimit64 302 261; tgkill 234 131; socketpair 53 199; ioctl 16 29;
prctl 157 167; fcntl 72 25
"""
ABSENT = """
clone3 435 435; openat2 437 437; setxattr 188 5; lsetxattr 189 6; fsetxattr 190 7
"""

ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, NO_SUCH_CALL = 0x00050000 | 1, 0x00050000 | 38  # EPERM, ENOSYS
LOAD, AND, EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06  # 32 bits of the call; A & k; A == k; answer

OPEN_FOR_WRITING = 0o3 | 0o100 | 0o1000 | 0o20000000  # access mode, create, truncate, unnamed file
NEW_NAMESPACES = 0x7E020000
CLONE_PARENT, CLONE_THREAD = 0x8000, 0x10000
TERMINAL_REQUESTS = (0x5401, 0x5413, 0x5421, 0x541B, 0x5450, 0x5451)  # read its state; flags of a descriptor
OWNERS_OF_SIGNALS = (8, 10, 15)  # fcntl: set the process that a descriptor signals
SOME_PROCESS = 0x6B70E1D5  # placeholder, never a process id
PR_SET_NAME, AF_UNIX, SOCK_STREAM = 15, 1, 1

Code = list[tuple[int, int, int, int]]  # operation, steps to skip if true and if false, constant


def numbers(table: str, column: int) -> dict[str, int]:
    """Return name and number of each call that the architecture has."""
    rows = (entry.split() for entry in table.replace("\n", " ").split(";"))
    return {row[0]: int(row[1 + column]) for row in rows if row[1 + column] != "-"}


def available() -> bool:
    """Return whether this machine's architecture has a filter."""
    return platform.machine() in ARCHITECTURES


def for_process(filter: bytes, pid: int) -> bytes:
    """Return a filter of ``program`` for one process, which may send signals to its own threads alone."""
    return filter.replace(struct.pack("=I", SOME_PROCESS), struct.pack("=I", pid))


def program(writing: bool, processes: bool = False) -> bytes:
    """Assemble the filter; ``for_process`` completes it for ``prctl``.

    Args:
        writing: files may be opened for writing, if other rules allow it.
        processes: processes may be started and signaled; for a separate process tree.
    """
    audit, column = ARCHITECTURES[platform.machine()]
    code: Code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for name, number in numbers(RULED, column).items():
        rule = _rule(name, writing, processes)
        code += [(EQUAL, 0, len(rule), number), *rule]
    for table in (PLAIN, *[WRITING] * writing, *[PROCESSES] * processes):
        for number in numbers(table, column).values():
            code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for number in numbers(ABSENT, column).values():
        code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, NO_SUCH_CALL)]
    code.append((RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("=HBBI", *step) for step in code)


def _rule(name: str, writing: bool, processes: bool) -> Code:
    """Return the steps that decide on a call by its arguments; they always answer."""
    if name in ("open", "openat"):
        if writing:
            return [(RETURN, 0, 0, ALLOW)]
        return _one_of(1 if name == "open" else 2, OPEN_FOR_WRITING, (0,))
    if processes and name == "tgkill":
        return [(RETURN, 0, 0, ALLOW)]
    if processes and name == "clone":
        return _one_of(0, NEW_NAMESPACES | CLONE_PARENT, (0,))
    if name == "clone":  # threads alone
        return _one_of(0, NEW_NAMESPACES | CLONE_PARENT | CLONE_THREAD, (CLONE_THREAD,))
    if name == "prlimit64":  # reading alone: the pointer to a new limit must be null
        high = [(LOAD, 0, 0, 16 + 8 * 2 + 4), (EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE)]
        return [*high, *_one_of(2, 0xFFFFFFFF, (0,))]
    if name == "tgkill":
        return _one_of(0, 0xFFFFFFFF, (SOME_PROCESS,))
    if name == "socketpair":  # a connected stream cannot send to other addresses
        kind = [(LOAD, 0, 0, 16 + 8), (AND, 0, 0, 0xF), (EQUAL, 1, 0, SOCK_STREAM), (RETURN, 0, 0, REFUSE)]
        return [*kind, *_one_of(0, 0xFFFFFFFF, (AF_UNIX,))]
    if name == "ioctl":
        return _one_of(1, 0xFFFFFFFF, TERMINAL_REQUESTS)
    if name == "fcntl":
        return _one_of(1, 0xFFFFFFFF, OWNERS_OF_SIGNALS, found=REFUSE, otherwise=ALLOW)
    assert name == "prctl"
    return _one_of(0, 0xFFFFFFFF, (PR_SET_NAME,))


def _one_of(
    argument: int, mask: int, values: tuple[int, ...], found: int = ALLOW, otherwise: int = REFUSE
) -> Code:
    """Return steps that answer by the lower 32 bits of an argument, masked."""
    code: Code = [(LOAD, 0, 0, 16 + 8 * argument), (AND, 0, 0, mask)]
    for value in values:
        code += [(EQUAL, 0, 1, value), (RETURN, 0, 0, found)]
    return [*code, (RETURN, 0, 0, otherwise)]
