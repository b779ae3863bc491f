"""Lines to workers on other nodes that carry nothing, so that a node that is gone without a word is missed soon.

Ray misses such a node after about a minute. An idle connection is probed by the system, which knows in a quarter of
that (``engine_plugin_processes.peer_watch``): the controller of the worker's node, and the worker of the controller's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from engine_plugin_processes.channel import Channel, Closed, callers, listen

log = logging.getLogger("engine")

LOOK_SECONDS = 0.5  # between two looks at the actors, while they come
MOST_SECONDS = 40.0  # for all of them to come


def hold(actors: Mapping[int, Any], host: str, token: str) -> dict[int, Channel]:
    """A line from each of these actors to this process.

    Args:
        actors: ``actor.Seat`` by rank, on other nodes.
        host: the address of this node, as they reach it.
        token: of the run.

    Returns:
        By rank. Those that do not reach this process are left out, with a warning: Ray's own checks are all that they have.
    """
    lines: dict[int, Channel] = {}
    if not actors:
        return lines
    with listen(host) as listener:
        at = listener.getsockname()[:2]
        asked = {rank: actor.hold.remote(at, token, rank) for rank, actor in actors.items()}
        end = time.monotonic() + MOST_SECONDS
        with contextlib.closing(callers(listener, token, end, LOOK_SECONDS)) as coming:
            for found in coming:
                if found is not None and found[0] in actors and found[0] not in lines:
                    lines[found[0]] = found[1]
                elif found is not None:
                    found[1].close()
                if set(actors) <= set(lines) | _failed(asked):
                    break
    if without := sorted(set(actors) - set(lines)):
        log.warning(
            "Rank %s does not reach the controller at %s: should its node be lost, Ray says so after about a minute. Let "
            "nodes reach each other on any port, as Ray asks.",
            ", ".join(map(str, without)),
            host,
        )
    return lines


def _failed(asked: Mapping[int, Any]) -> set[int]:
    """Ranks that could not call."""
    failed = set()
    for rank, reference in asked.items():
        if ray.wait([reference], timeout=0)[0]:
            try:
                ray.get(reference)
            except RayError:
                failed.add(rank)
    return failed


def end_with(line: Channel, end: Callable[[], object]) -> None:
    """Call ``end`` in a thread once the other side of a line is gone.

    consumes: nothing, a line carries nothing; waits for: the end of the line; unblocked by: that; produces: the call.
    """

    def wait() -> None:
        with contextlib.suppress(Closed):
            line.receive()
        end()

    threading.Thread(target=wait, name="line", daemon=True).start()
