"""Idle connections to workers on other nodes, by which a node that is lost without notice is detected soon.

Ray detects the loss after about a minute. The system probes an idle connection and detects it in a quarter of that
time (``engine_plugin_processes.channel.KEEPALIVE``): the controller detects the loss of a worker's node, and the worker that
of the controller's.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from engine_plugin_processes.channel import Channel, callers, listen

log = logging.getLogger("engine")

LOOK_SECONDS = 0.5  # between two checks of the actors while they connect
MOST_SECONDS = 40.0  # for all of them to connect


def hold(actors: Mapping[int, Any], host: str, token: str) -> dict[int, Channel]:
    """Open a connection from each of these actors to this process.

    Args:
        actors: ``actor.Seat`` by rank, on other nodes.
        host: address of this node, as the actors reach it.
        token: the run's token.

    Returns:
        The connections by rank. Actors that do not reach this process are left out, with a warning: only Ray's own
        checks detect their loss.
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
    """Return the ranks that could not connect."""
    failed = set()
    for rank, reference in asked.items():
        if ray.wait([reference], timeout=0)[0]:
            try:
                ray.get(reference)
            except RayError:
                failed.add(rank)
    return failed
