"""Processes of an external launcher such as ``torchrun``: one runs the command, the others are its workers.

The part ``launcher`` is loaded only in a process that a launcher started.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine_core.plugins import PluginSet

VARIABLE = "TORCHELASTIC_RUN_ID"


def launched() -> bool:
    """Return whether ``torchrun`` started this process as one of several ranks."""
    return VARIABLE in os.environ and "RANK" in os.environ


@contextmanager
def controlling() -> Iterator[bool]:
    """Yield whether this process runs the command; at exit notify the other ranks that no session follows.

    Raises:
        PluginError: a launcher started this process, and no installed plugin has the part ``launcher``.
    """
    if not launched():
        yield True
        return
    with _launcher().controlling() as controls:
        yield controls


def serve() -> int:
    """Serve as a worker in each session of the rank that runs the command; return the exit code."""
    return int(_launcher().serve())


def _launcher() -> Any:
    return PluginSet().require("parts", "launcher")
