"""Sockets and pipes that forked children close at once, so that they close with this process.

A forked process (of a reward, of a data loader) inherits its parent's descriptors. Without this module its copies stay
open after the parent has ended, and a peer that waits for the end of the connection waits on.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol, TypeVar


class End(Protocol):
    """A socket, or a pipe as an unbuffered file."""

    def close(self) -> None:
        """Close the descriptor."""


E = TypeVar("E", bound=End)
_ENDS: weakref.WeakSet[End] = weakref.WeakSet()


def close_in_children(end: E) -> E:
    """Close ``end`` in each process that is forked from this one, and return it; here it stays open."""
    _ENDS.add(end)
    return end


def _close_inherited() -> None:
    for end in list(_ENDS):
        end.close()
    _ENDS.clear()


os.register_at_fork(after_in_child=_close_inherited)
