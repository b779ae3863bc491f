"""Samplers that are lost one by one: the others go on, and a new process comes in the place of each.

A lost process is replaced in the background and takes part again from the next update of weights on, which brings it
the current ones. Only where the sampler has a pool of its own; each of its processes is then a world of its own for
``torch.distributed``, since a world cannot lose a rank and go on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.errors import WorkerLost

if TYPE_CHECKING:
    from engine_core.runtime.crew import Crew
    from engine_core.runtime.worker_process import WorkerHandle

log = logging.getLogger("engine")


class Replacements:
    """Who of the sampler's ranks is there.

    consumes: losses, from ``lost``; waits for: new processes, each in a thread of its own; unblocked by: their answers;
    produces: ranks that are there again, in ``join``.

    Args:
        crew: all workers.
        ranks: of the run, of the sampler's pool.
        budget: processes that may be replaced in the run's session.
        key: where the user says so.
        begin: starts a process for a rank and gives its first command; both may take long.
    """

    def __init__(
        self,
        crew: Crew,
        ranks: Sequence[int],
        budget: int,
        key: str,
        begin: Callable[[int, int], tuple[WorkerHandle, Mapping[str, Any]]],
        start_seconds: float,
    ) -> None:
        self.crew, self.ranks, self.budget, self.key = crew, tuple(ranks), budget, key
        self.begin, self.start_seconds = begin, start_seconds
        self.away: set[int] = set()  # lost, or not there yet
        self.counts = dict.fromkeys(("sampling/lost", "sampling/joined", "sampling/reissued"), 0)
        self.losses = dict.fromkeys(self.ranks, 0)  # of each rank, so far
        self._used = 0
        self._ready: list[int] = []
        self._lock = threading.RLock()

    @property
    def present(self) -> list[int]:
        """Ranks that sample."""
        with self._lock:
            return [rank for rank in self.ranks if rank not in self.away]

    def lost(self, worker: WorkerHandle, loss: WorkerLost) -> bool:
        """Whether the run goes on without this worker; then another is begun in its place."""
        rank = worker.rank
        with self._lock:
            others = [other for other in self.present if other != rank]
            if rank not in self.ranks or not others or self._used >= self.budget:
                return False
            self._used += 1
            self.away.add(rank)
            self.losses[rank] += 1
            self.counts["sampling/lost"] += 1
            number = self._used
        log.warning(
            "%s The others go on with what it had not finished; it is replaced (%d of %d, %s).",
            loss, number, self.budget, self.key,
        )  # fmt: skip
        threading.Thread(target=self._replace, args=(worker, number), name="replace", daemon=True).start()
        return True

    def join(self) -> bool:
        """Take back who has come; whether somebody has. Their weights are not the current ones yet."""
        with self._lock:
            joined, self._ready = self._ready, []
            self.away -= set(joined)
            self.counts["sampling/joined"] += len(joined)
        for rank in joined:
            log.info("Worker rollout[%d] takes part again, from this update of weights on.", rank)
        return bool(joined)

    def reissue(self, count: int) -> None:
        """So many requests of a lost process were given to others."""
        with self._lock:
            self.counts["sampling/reissued"] += count

    def metrics(self) -> dict[str, float]:
        """Since it was last asked."""
        with self._lock:
            told = {name: float(value) for name, value in self.counts.items()}
            self.counts = dict.fromkeys(self.counts, 0)
        return told

    def _replace(self, old: WorkerHandle, number: int) -> None:
        """One new process, to where it could sample."""
        rank = old.rank
        try:
            old.kill()
            worker, order = self.begin(rank, number)
            worker.roles = old.roles
            self.crew.admit(worker)
            command = self.crew.next_number()
            self.crew.send(
                {rank: {**order, "id": command}},
                ("worker", "start"),
                command,
                deadline=self.start_seconds,
            ).result()
        except WorkerLost:
            return  # told, and replaced again as far as the budget goes
        except Exception as error:
            with contextlib.suppress(Exception):
                self.crew.workers[rank].kill()
            log.exception("Worker rollout[%d] cannot be replaced (%s); the others go on.", rank, error)
            return
        with self._lock:
            self._ready.append(rank)
