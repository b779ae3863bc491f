"""A worker of the conformance kit: ``python -m engine_plugin_testing.worker``, one rank of a group.

It reads JSON lines from stdin and answers by JSON lines::

    {"rank": 0, "world_size": 1, "path": [...], "folder": "/tmp/...", "context": "", ...}   the order
    -> {"ready": true}
    {"bench": "module:Class", "case": "module:function", "settings": {...}, "folder": "...", "deadline": 120}
    -> {"failed": "", "crashed": false}   or the failure's text, and whether it was no failed assertion

The answers go to a private copy of stdout. What engines print goes to stderr, and stdin is empty, so that nothing can
disturb the protocol. Past the deadline a watchdog in C prints every stack and ends the process, even while another
thread holds the interpreter.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRACE_SECONDS = 5.0  # after the launcher's own deadline
INTERNAL = ("worker.py", "contextlib.py")  # frames that say nothing about a failure


@dataclass(frozen=True)
class Place:
    """A worker's rank and the folders that it shares with the other ranks."""

    rank: int
    world_size: int
    cache: Path  # shared by the ranks, for the life of the group
    folder: Path  # shared by the ranks, for this case alone


def main() -> None:
    """Serve until stdin ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    order = json.loads(requests.readline() or b"{}")
    if not order:
        return
    sys.path[:] = order["path"]

    def send(message: dict[str, Any]) -> None:
        """Write a message as one JSON line to ``replies``."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(replies, data) :]

    with contextlib.ExitStack() as stack:
        try:
            _enter(stack, order)
        except Exception:
            send({"refused": traceback.format_exc()})
            return
        send({"ready": True})
        for line in requests:
            request = json.loads(line)
            faulthandler.dump_traceback_later(request["deadline"] + GRACE_SECONDS, exit=True)
            failed, crashed = run(request, order)
            faulthandler.cancel_dump_traceback_later()
            send({"failed": failed, "crashed": crashed})


def _enter(stack: contextlib.ExitStack, order: dict[str, Any]) -> None:
    """Take a device, join the ranks, then enter the plugin's own context."""
    process_group = order["process_group"]
    if order["accelerator"]:
        from engine_plugin_testing.devices import take_own

        process_group = take_own(order["accelerator"], order["rank"], process_group)
    if order["world_size"] > 1:
        import torch.distributed as dist

        dist.init_process_group(
            process_group,
            init_method=f"file://{order['cache']}/store",
            rank=order["rank"],
            world_size=order["world_size"],
            timeout=datetime.timedelta(seconds=order["deadline"]),
        )
        stack.callback(dist.destroy_process_group)
    if order["context"]:
        made: AbstractContextManager[Any] = resolve(order["context"], Path(order["root"]))(
            rank=order["rank"], world_size=order["world_size"]
        )
        stack.enter_context(made)


def run(request: dict[str, Any], order: dict[str, Any]) -> tuple[str, bool]:
    """Run one case on its bench.

    Returns:
        The failure's text, empty if the case holds; and whether the failure is no failed assertion.
    """
    place = Place(order["rank"], order["world_size"], Path(order["cache"]), Path(request["folder"]))
    try:
        bench = resolve(request["bench"])
        case = resolve(request["case"], Path(request["settings"].get("root", ".")))
        with bench(request["settings"], place) as made:
            case(made)
    except (Exception, SystemExit) as exc:
        return _told(exc), not isinstance(exc, AssertionError)
    return "", False


def resolve(name: str, root: Path | None = None) -> Any:
    """Import ``module:qualname``, or ``file.py:qualname`` relative to ``root``."""
    module, _, qualname = name.partition(":")
    if module.endswith(".py"):
        from engine_core.plugins.modules import import_file

        found: Any = import_file(module, root or Path.cwd(), allow_code=True)[0]
    else:
        found = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _told(exc: BaseException) -> str:
    """Return the error's message and its traceback without ``INTERNAL`` frames."""
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if Path(f.filename).name not in INTERNAL]
    kind = "" if isinstance(exc, AssertionError) else f"{type(exc).__name__}: "
    return f"{kind}{exc}\n\n{''.join(traceback.format_list(frames))}".rstrip()


if __name__ == "__main__":
    main()
