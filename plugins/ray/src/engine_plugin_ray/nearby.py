"""Mailboxes of workers on the controller's machine: a socket over the loopback interface, as the runtime torchrun has.

A message by Ray takes several processes and threads, one over a socket takes two. Ray still starts the worker, and
reports when and why it has ended.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from engine_core.errors import EnvironmentProblem
from engine_plugin_processes.channel import Channel, callers, listen

HOST = "127.0.0.1"
LOOK_SECONDS = 0.5  # between two checks of the actors while they connect
DRAIN_SECONDS = 1.0  # to receive what an actor sent before it ended


class NearEnd(Channel):
    """The controller's end of a socket to an actor.

    A thread watches the actor. consumes: nothing; waits for: Ray's report of the actor's end; unblocked by: that;
    produces: ``loss`` and ``over``, and the end of the socket.

    Args:
        connection: the socket to the actor.
        actor: ``actor.Seat``.
    """

    def __init__(self, connection: socket.socket, actor: Any) -> None:
        super().__init__(connection)
        self.loss = ""  # Ray's description of the actor's end
        self.over = threading.Event()  # the actor sends nothing more
        self._served = actor.served.remote()
        threading.Thread(target=self._watch, name="actor", daemon=True).start()

    def _watch(self) -> None:
        """Close the socket of an actor that was lost, even if a process that it started also holds the socket."""
        try:
            ray.get(self._served)
        except RayError as error:
            self.loss = str(error)
        self.over.set()
        if self.loss:
            time.sleep(DRAIN_SECONDS)
            self.close()


def connect_all(actors: Mapping[int, Any], token: str, seconds: float) -> dict[int, NearEnd]:
    """Make actors of this machine serve commands over sockets.

    Args:
        actors: ``actor.Seat`` by rank.
        token: the token that actors prove to know.
        seconds: time limit for all actors to connect.

    Raises:
        EnvironmentProblem: an actor does not reach this process, or not in time.
        RayError: an actor has ended.
    """
    ends: dict[int, NearEnd] = {}
    if not actors:
        return ends
    with listen(HOST) as listener:
        try:
            _take_in(listener, actors, token, time.monotonic() + seconds, ends)
        except BaseException:
            for end in ends.values():
                end.close()
            raise
    return ends


def _take_in(
    listener: socket.socket, actors: Mapping[int, Any], token: str, deadline: float, ends: dict[int, NearEnd]
) -> None:
    """Accept actors into ``ends`` until all are connected; peers without the token are rejected.

    Raises:
        EnvironmentProblem: an actor does not reach this process, or not in time.
    """
    at = listener.getsockname()[:2]
    asked = {rank: actor.serve.remote(at, token, rank) for rank, actor in actors.items()}
    with contextlib.closing(callers(listener, token, deadline, LOOK_SECONDS)) as coming:
        while missing := sorted(set(actors) - set(ends)):
            found = next(coming, None)
            if found is None:
                _look(missing, asked, time.monotonic() >= deadline)
                continue
            rank, channel = found
            if rank in missing:
                ends[rank] = NearEnd(channel.socket, actors[rank])
            else:
                channel.close()


def _look(missing: list[int], asked: Mapping[int, Any], late: bool) -> None:
    """Raise if an actor that has not connected failed, or is late.

    Raises:
        EnvironmentProblem: with the rank and the reason.
    """
    for rank in missing:
        if ray.wait([asked[rank]], timeout=0)[0]:
            try:
                ray.get(asked[rank])
            except ray.exceptions.RayTaskError as error:
                cause = str(error).strip().splitlines()[-1]
                raise EnvironmentProblem(
                    f"The worker of rank {rank} does not reach the controller over {HOST} ({cause}). "
                    "Set runtime.ray.worker_transport = 'ray', if they share a machine and no network."
                ) from error
    if late:
        raise EnvironmentProblem(
            f"Rank {', '.join(map(str, missing))} did not come over {HOST} within runtime.ray.startup_timeout_minutes. "
            "Set runtime.ray.worker_transport = 'ray', if workers and controller share a machine and no network."
        )
