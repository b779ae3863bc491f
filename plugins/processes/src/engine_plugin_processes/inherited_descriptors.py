"""Sockets that forked children close at once, so that they close with this process.

A forked process (of a reward, of a data loader) inherits its parent's descriptors. Without this module its copies stay
open after the parent has ended, and a peer that waits for the end of the connection waits on.
"""

from __future__ import annotations

import os
import socket
import weakref

_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(connection: socket.socket) -> socket.socket:
    """Close a socket in each process that is forked from this one, and return it; here it stays open."""
    _SOCKETS.add(connection)
    return connection


def _close_inherited() -> None:
    for connection in list(_SOCKETS):
        connection.close()
    _SOCKETS.clear()


os.register_at_fork(after_in_child=_close_inherited)
