"""The process in the box: ``python -I -S inside ORDER``, spoken to over the socket that is its stdin.

It closes the box around itself, imports what programs are likely to import, and then starts a fork of
itself for each job (``serve``). It runs nothing that a model wrote, and reads nothing that a program
wrote: what those print goes to the engine through pipes that the engine made.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys


def main() -> None:
    """Serve until the socket ends; a box that cannot be closed says why, and ends."""
    order = json.loads(sys.argv[1])
    os.environ.clear()
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        from serve import Box

        _close_up(order)
        for name in order["preload"]:
            with contextlib.suppress(ImportError):  # another version of Python may not have it
                importlib.import_module(name)
        box = Box(channel, order)
    except (OSError, AttributeError) as exc:  # AttributeError: a libc without the function
        channel.sendall(json.dumps({"failed": str(exc)}).encode() + b"\n")
        return
    del sys.path[0]  # the folder of this file is the box's own
    box.serve()


def _close_up(order: dict) -> None:
    if not sys.platform.startswith("linux"):
        return
    import view

    if order["tier"] == "bubblewrap":  # which has built the box already
        view.end_with_parent(0, apart=True)
    else:
        view.end_with_parent(order["parent"])
    if order["tier"] == "namespaces":
        view.enter(order["readable"])


main()
