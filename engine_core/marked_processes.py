"""Kill all that a process has started, in any session: the processes inherit a mark by the environment.

A process that removes the mark from the environment of its children hides them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import psutil

MARK = "ENGINE_PROCESS_MARK"
"""The environment variable of the mark. The value is unique to what is killed together."""


def kill_marked(marks: Collection[str]) -> None:
    """Kill the processes of this user whose mark is one of ``marks``."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is of another user
            if process.environ().get(MARK) in marks:
                process.kill()
