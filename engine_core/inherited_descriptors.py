"""Ends of sockets and pipes that close with this process, whatever it has forked: what ends then tells others to end.

A process that is forked (by a reward, by a loader of data) holds whatever its parent has open, and would keep alive
what waits for that parent's end.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol, TypeVar


class End(Protocol):
    """A socket, or a pipe as a file without a buffer."""

    def close(self) -> None: ...


E = TypeVar("E", bound=End)
_ENDS: weakref.WeakSet[End] = weakref.WeakSet()


def close_in_children(end: E) -> E:
    """Have processes that are forked from this one close it at once; for this one it stays open."""
    _ENDS.add(end)
    return end


def _close_inherited() -> None:
    for end in list(_ENDS):
        end.close()
    _ENDS.clear()


os.register_at_fork(after_in_child=_close_inherited)
