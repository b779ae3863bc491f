"""Child processes that talk in lines and end with this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

LINE_BYTES = 16 * 2**20  # of one message of a child; a longer one ends the connection
GUARD = Path(__file__).with_name("end_with_parent.py")
WAIT_SECONDS = 1.0  # for the end of a killed child
ERRORS_BYTES = 2**20  # of the file of a child's stderr
BASIC = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER")
"""Environment variables that a child receives in any case."""
SAID_BYTES = 300  # of a child's stderr, in messages


async def start_child(
    command: Sequence[str], variables: Iterable[str], errors: Any
) -> asyncio.subprocess.Process:
    """Start a command that ends with the thread of this loop.

    Args:
        command: program and arguments.
        variables: names of the environment variables that it receives in addition to ``BASIC``.
        errors: the file of its stderr.
    """
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        env={name: os.environ[name] for name in (*BASIC, *variables) if name in os.environ},
        start_new_session=True,
        limit=LINE_BYTES,
    )


async def kill_child(process: asyncio.subprocess.Process) -> None:
    """Kill a child and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # Python 3.11 waits for all that hold its pipes
        await asyncio.wait_for(process.wait(), WAIT_SECONDS)


def shorten(errors: Any) -> None:
    """Empty the file of a child's stderr if it is large."""
    if os.fstat(errors.fileno()).st_size > ERRORS_BYTES:
        errors.seek(0)  # for the child too
        errors.truncate()


def last_words(errors: Any) -> str:
    """Return the end of what a child wrote to stderr, as one line."""
    size = os.fstat(errors.fileno()).st_size  # the child shares the position in the file
    said = os.pread(errors.fileno(), SAID_BYTES, max(0, size - SAID_BYTES))
    return " ".join(said.decode(errors="replace").split())
