"""A reward worker: ``python worker.py``, told by JSON lines on stdin, answering by JSON lines.

The first line is the order (``Order`` in ``pool``): which reward, by name, from which plugins. Then::

    {"count": 2, "columns": {"completions": ["4", "5"], "answer": ["4", "4"]}}
    -> {"at": 0, "outcome": {"value": 1.0}}
    -> {"at": 1, "outcome": {"value": 0.0}}
    -> {"done": true}

The answers go to a private copy of stdout; what the function prints goes to stderr, and stdin is
empty, so no function can disturb the protocol. A watchdog in C ends the process when a call takes too
long, whoever holds the interpreter, and prints where it was; it also ends a worker whose controller
was killed.
"""

# Only the standard library up here: the order brings the path on which engine_core is found.
from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from engine_core.rewards.signatures import RewardFunction


def main() -> None:
    """Serve until stdin ends."""
    channel = _Channel()
    order = json.loads(channel.requests.readline() or b"{}")
    if not order:
        return
    sys.path[:] = order["path"]
    _limit_memory(order["max_memory_gb"])
    from engine_core.errors import EngineError

    notes = _Notes()
    logging.getLogger("engine").addHandler(notes)
    logging.getLogger("engine").setLevel(logging.INFO)
    try:
        reward = build(order)
    except EngineError as exc:
        channel.send({"refused": type(exc).__name__, "message": str(exc)})
        return
    channel.send({"ready": vars(reward.signature), "notes": notes.lines})
    serve(reward, order["timeout"], channel)


class _Channel:
    """The two private pipes; fds 0 and 1 are given to the function to play with."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.requests: BinaryIO = os.fdopen(os.dup(0), "rb")
        self.replies = os.dup(1)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        os.register_at_fork(after_in_child=self._forked)
        faulthandler.enable()

    def _forked(self) -> None:
        """A child that the function forked must not hold the pipe open when this process is gone."""
        if self.replies >= 0:
            os.close(self.replies)
            self.replies = -1

    def send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self.pid:  # a fork that came back from the function
            os._exit(0)
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(self.replies, data) :]


class _Notes(logging.Handler):
    """What was logged while the reward was loaded; the controller logs it again."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _limit_memory(gigabytes: float) -> None:
    with contextlib.suppress(OSError):  # Linux only: if memory runs out, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    if gigabytes:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (int(gigabytes * 1e9),) * 2)


def build(order: dict[str, Any]) -> RewardFunction:
    """The reward that the order names, with its options checked.

    Raises:
        EngineError: the plugin does not load, or its function cannot be called with the options.
    """
    from engine_core.plugins.metadata import find
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.rewards.signatures import load_reward

    name, root = order["reward"], Path(order["root"])
    # A one-file plugin is loaded only for a reward that no installed plugin offers.
    modules = [] if any(find("rewards", name)) else order["modules"]
    plugins = PluginSet.load({"rewards": [name]}, modules, root, order["allow_code"])
    return load_reward(
        name, plugins, order["options"], root, order["allow_code"], order["timeout"], order["modules"]
    )


def serve(reward: RewardFunction, timeout: float, channel: _Channel) -> None:
    """Answer requests until there are no more."""
    from engine_core.rewards.signatures import evaluate

    @contextlib.contextmanager
    def watchdog(seconds: float) -> Iterator[None]:
        # A thread of C: works while the function holds the interpreter. Exits with status 1.
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            yield
        except SystemExit as exc:  # the function ends this process, so it ends: as os._exit or a crash would
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(exc.code if isinstance(exc.code, int) else exc.code is not None)
        finally:
            faulthandler.cancel_dump_traceback_later()

    for line in channel.requests:
        request = json.loads(line)
        for position, outcome in evaluate(reward, request["columns"], request["count"], timeout, watchdog):
            channel.send({"at": position, "outcome": vars(outcome)})
        channel.send({"done": True})


if __name__ == "__main__":
    main()
