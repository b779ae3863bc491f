"""The controller's handle of one actor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from engine_plugin_processes.child import ENDING_SECONDS, LAST_LINES
from engine_plugin_processes.worker_process import WorkerHandle

if TYPE_CHECKING:
    from engine_plugin_ray.mail import ControllerEnd
    from engine_plugin_ray.nearby import NearEnd

REASON = re.compile(
    r"The actor (?:is dead|died) because (.*?)(?:\. Some common causes include|\n|$)", re.DOTALL
)


class ActorHandle(WorkerHandle):
    """A ``WorkerHandle`` of an actor.

    Args:
        rank: the actor's rank in the run.
        actor: ``actor.Seat``.
        channel: the mailbox of the actor.
        about: where it runs, as returned by ``Seat.about``.
        logs: folder with the output of its node's processes, if that is this node.
    """

    def __init__(
        self,
        rank: int,
        actor: Any,
        channel: ControllerEnd | NearEnd,
        about: Mapping[str, Any],
        logs: Path | None,
    ) -> None:
        super().__init__(rank, channel, None, about["host"])  # type: ignore[arg-type]
        self.actor, self.address, self.node = actor, str(about["address"]), str(about["node"])
        self.pid, self._logs, self._end = int(about["pid"]), logs, channel

    def how_it_ended(self, cause: str = "") -> str:
        """Return why the actor ended, in Ray's words, with the end of its output."""
        self._end.over.wait(ENDING_SECONDS)  # Ray reports the end later than a socket does
        found = REASON.search(self._end.loss)
        said = " ".join(found[1].split()) if found else "its mailbox was closed"
        text = "\n".join(self._printed_last())
        last = f" The last that it printed:\n{text}" if text else ""
        return f"{cause or f'process {self.pid} ended: {said}'}.{last}"

    def ended(self, seconds: float) -> bool:
        """Return whether the actor ends within that time."""
        return self._end.over.wait(seconds)

    def kill(self) -> None:
        """Kill the actor and the processes that it started."""
        ray.kill(self.actor, no_restart=True)
        self._end.close()

    def _printed_last(self) -> list[str]:
        lines: list[str] = []
        for file in sorted(self._logs.glob(f"worker-*-{self.pid}.err")) if self._logs else ():
            lines += file.read_text("utf-8", "replace").splitlines()
        return [line for line in lines if not line.startswith(":")][-LAST_LINES:]  # Ray's own marks
