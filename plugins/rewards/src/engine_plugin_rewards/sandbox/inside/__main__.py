"""The process in the box: ``python -I -S inside ORDER``, controlled over the socket that is its stdin.

It closes the box around itself, imports modules that programs are likely to import, and then forks for each job
(``serve``). It runs no code of a model, and reads no output of a program: output goes to the engine through pipes that
the engine made.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys


def main() -> None:
    """Serve until the socket ends; if the box cannot be closed, report why and end."""
    order = json.loads(sys.argv[1])
    os.environ.clear()
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        import view
        from serve import Box

        view.end_with_parent(order["parent"])
        if order["tier"] == "namespaces":
            view.enter(order["readable"])
        for name in order["preload"]:
            with contextlib.suppress(ImportError):  # another version of Python may lack the module
                importlib.import_module(name)
        box = Box(channel, order)
    except (OSError, AttributeError) as exc:  # AttributeError: a libc without the function
        channel.sendall(json.dumps({"failed": str(exc)}).encode())
        return
    del sys.path[0]  # programs must not import from the folder of this file
    box.serve()


main()
