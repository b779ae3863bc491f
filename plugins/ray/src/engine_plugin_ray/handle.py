"""The controller's handle of one actor."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from engine_plugin_processes.child import ENDING_SECONDS, LAST_LINES
from engine_plugin_processes.worker_process import WorkerHandle

if TYPE_CHECKING:
    from engine_plugin_processes.channel import Channel

DRAIN_SECONDS = 1.0  # to receive what an actor sent before it ended
REASON = re.compile(
    r"The actor (?:is dead|died) because (.*?)(?:\. Some common causes include|\n|$)", re.DOTALL
)


class ActorHandle(WorkerHandle):
    """A ``WorkerHandle`` of an actor.

    Args:
        rank: the actor's rank in the run.
        actor: ``actor.Seat``.
        channel: the connection to the actor.
        served: reference to the result of ``Seat.serve``, which ends with the actor.
        about: where it runs, as returned by ``Seat.about``.
        logs: folder with the output of its node's processes, if that is this node.
    """

    def __init__(
        self,
        rank: int,
        actor: Any,
        channel: Channel,
        served: Any,
        about: Mapping[str, Any],
        logs: Path | None,
    ) -> None:
        super().__init__(rank, channel, None, about["host"])
        self.actor, self.address, self.node = actor, str(about["address"]), str(about["node"])
        self.pid, self._served, self._logs = int(about["pid"]), served, logs
        self._ended_at = 0.0

    def notice_death(self) -> None:
        """Close the channel of an ended actor, even if a process that it started keeps the socket open."""
        if self.ended(0.0):
            self._ended_at = self._ended_at or time.monotonic()
            if time.monotonic() - self._ended_at > DRAIN_SECONDS:
                self.channel.close()

    def how_it_ended(self, cause: str = "") -> str:
        """Return why the actor ended, in Ray's words, with the end of its output."""
        if self._missed:  # Ray reports a lost node after about a minute
            return super().how_it_ended(cause)
        said = "its connection was closed"
        try:
            ray.get(self._served, timeout=ENDING_SECONDS)  # Ray reports the end later than a socket does
        except GetTimeoutError:
            pass
        except RayError as error:
            found = REASON.search(str(error))
            said = " ".join(found[1].split()) if found else said
        text = "\n".join(self._printed_last())
        last = f" The last that it printed:\n{text}" if text else ""
        return f"{cause or f'process {self.pid} ended: {said}'}.{last}"

    def ended(self, seconds: float) -> bool:
        """Return whether the actor ends within that time."""
        return bool(ray.wait([self._served], timeout=seconds)[0])

    def kill(self) -> None:
        """Kill the actor and the processes that it started."""
        ray.kill(self.actor, no_restart=True)
        super().kill()

    def _printed_last(self) -> list[str]:
        lines: list[str] = []
        for file in sorted(self._logs.glob(f"worker-*-{self.pid}.err")) if self._logs else ():
            lines += file.read_text("utf-8", "replace").splitlines()
        return [line for line in lines if not line.startswith(":")][-LAST_LINES:]  # Ray's own marks
