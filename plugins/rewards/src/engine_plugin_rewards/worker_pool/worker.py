"""A reward worker: ``main`` runs in a child process and answers requests in JSON.

The first message is the order (``Pool``): which reward, by name, from which plugins. Then::

    {"count": 2, "seconds": 10.0, "columns": {"completions": ["4", "5"], "answer": ["4", "4"]}}
    -> {"at": 0, "outcome": {"value": 1.0}}
    -> {"at": 1, "outcome": {"value": 0.0}}
    -> {"done": true}

The messages use a dedicated socket, so that no function can disturb the protocol by what it prints or reads. A
watchdog in C ends the process when a call takes too long, even if the function holds the interpreter, and prints the
stacks. It also ends a worker whose controller was killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.errors import EngineError
from engine_plugin_processes.child import print_stacks_on_request
from engine_plugin_processes.json_channel import Closed, JsonChannel

if TYPE_CHECKING:
    from engine_core.rewards.signatures import RewardFunction

MOST_NOTES = 1000  # lines that are logged while the reward is loaded


def main(number: int) -> None:
    """Serve the socket of that number until it is closed, by the controller's end or in a fork that the function made."""
    print_stacks_on_request()
    channel = JsonChannel(socket.socket(fileno=number))
    with contextlib.suppress(Closed):
        run(channel.receive(), channel)
    os._exit(0)  # in a fork, the worker's exit handlers must not run a second time


def run(order: dict[str, Any], channel: JsonChannel) -> None:
    """Load the reward and answer requests.

    Raises:
        Closed: the controller has closed the socket.
    """
    _limit_memory(order["max_memory_gb"])
    notes = BufferingHandler(MOST_NOTES)
    logging.getLogger("engine").addHandler(notes)
    logging.getLogger("engine").setLevel(logging.INFO)
    try:
        reward = build(order)
    except EngineError as exc:
        channel.send({"refused": type(exc).__name__, "message": str(exc)})
        return
    lines = [record.getMessage() for record in notes.buffer]  # the controller logs them again
    paced = getattr(reward.function, "samples_per_timeout", None)
    channel.send({"ready": vars(reward.signature), "notes": lines, "samples_per_timeout": paced})
    serve(reward, channel)


def _limit_memory(gigabytes: float) -> None:
    with contextlib.suppress(OSError):  # Linux only: if memory runs out, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    if gigabytes:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (int(gigabytes * 1e9),) * 2)


def build(order: dict[str, Any]) -> RewardFunction:
    """Load the reward that the order names, with its options checked.

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
    plugins.modules = order["modules"]  # from which a factory can load entries of other tables
    return load_reward(name, plugins, order["options"], order["timeout"])


def serve(reward: RewardFunction, channel: JsonChannel) -> None:
    """Answer requests.

    Raises:
        Closed: the controller has closed the socket.
    """
    from engine_core.rewards.signatures import evaluate

    @contextlib.contextmanager
    def watchdog(seconds: float) -> Iterator[None]:
        """End this process after ``seconds``, with its stacks printed, unless the block ends before."""
        # faulthandler uses a C thread, which works while the function holds the interpreter. Exit status: 1.
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            yield
        except SystemExit as exc:  # end the process as the function demands, like os._exit or a crash
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(exc.code if isinstance(exc.code, int) else exc.code is not None)
        finally:
            faulthandler.cancel_dump_traceback_later()

    while True:
        request = channel.receive()
        columns, count, seconds = request["columns"], request["count"], request["seconds"]
        for position, outcome in evaluate(reward, columns, count, seconds, watchdog):
            channel.send({"at": position, "outcome": vars(outcome)})
        channel.send({"done": True})
