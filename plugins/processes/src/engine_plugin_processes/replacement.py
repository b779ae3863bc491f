"""Replacement of lost samplers, one process at a time.

A new process starts in the background. In a runtime's pool it joins at the next weight update, which brings it the
current weights. Each process is a separate ``torch.distributed`` world, since a world cannot lose a rank and continue.
The owner of ``[rollout.process]`` sends the current weights to a process as soon as it has started, and may lose the
last process too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine_core.errors import WorkerLost

if TYPE_CHECKING:
    from engine_plugin_processes.worker_pool import WorkerPool
    from engine_plugin_processes.worker_process import WorkerHandle

log = logging.getLogger("engine")

CLOSE_SECONDS = 5.0  # for threads, once the run has ended
LOSS_SECONDS = 10.0  # to detect the loss of a process, once an update has failed
TICK_SECONDS = 0.05
COUNTS = ("sampling/lost", "sampling/joined", "sampling/reissued")

Begin = Callable[[int, int], "tuple[WorkerHandle, Mapping[str, Any]]"]
"""Starts a process for a rank, as the n-th replacement of the run, and returns it with its first command. May take long."""


@dataclass(eq=False)
class Replacements:
    """The replacement of lost samplers within a budget, and the record of which ranks sample.

    consumes: losses, from ``lost``; waits for: new processes, each in a separate thread; unblocked by: their answers;
    produces: ranks that sample again, in ``join``.
    """

    crew: WorkerPool  #: all workers
    ranks: Sequence[int]  #: of the sampler's pool
    budget: int  #: processes that may be replaced in one session
    key: str  #: configuration key of the budget, for messages
    begin: Begin  #: starts a process
    #: seconds for a new process to build its engine, and the key that sets them
    start_limit: tuple[float, str]
    last_too: bool = False  #: the last process may be lost as well: the owner waits for the new one
    failure: Exception | None = None  #: why a process could not be replaced
    away: set[int] = field(default_factory=set)  #: lost, and not replaced yet
    #: numbers of losses, replacements and repeated requests, by metric
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    losses: Counter[int] = field(default_factory=Counter)  #: losses so far, by rank
    _used: int = 0
    _ready: list[int] = field(default_factory=list)  # replaced ranks that sample after the next `join`
    _threads: list[threading.Thread] = field(default_factory=list)
    _closing: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def present(self) -> list[int]:
        """Ranks that sample."""
        with self._lock:
            return [rank for rank in self.ranks if rank not in self.away]

    def lost(self, worker: WorkerHandle, loss: WorkerLost) -> bool:
        """Replace a lost worker in the background; return whether the run continues without it meanwhile."""
        rank = worker.rank
        with self._lock:
            others = self.last_too or [other for other in self.present if other != rank]
            if rank not in self.ranks or not others or self._used >= self.budget or self._closing:
                return False
            self.away.add(rank)
            self._ready = [other for other in self._ready if other != rank]
            self.losses[rank] += 1
            self.counts["sampling/lost"] += 1
            self._used += 1
            thread = threading.Thread(
                target=self._replace, args=(worker, self._used), name="replace", daemon=True
            )
            self._threads.append(thread)
        log.warning(
            "It is started again (%d of %d, %s), and its unfinished requests are sent again: %s",
            self._used, self.budget, self.key, loss,
        )  # fmt: skip
        thread.start()
        return True

    def goes_on_without(self, error: BaseException | None) -> bool:
        """Return whether an error is the loss of a process that is being replaced, and of no other worker of the run."""
        present = self.present
        lost = isinstance(error, WorkerLost) and error.rank not in present
        return lost and self.crew.broken is None and bool(present or self.last_too)

    def lost_one_of(self, ranks: Sequence[int]) -> bool:
        """Return whether one of these ranks is lost and the run continues; wait, since an update fails before that is known."""
        deadline = time.monotonic() + LOSS_SECONDS
        while self.crew.broken is None and time.monotonic() < deadline:
            if not self.away.isdisjoint(ranks):
                return True
            time.sleep(TICK_SECONDS)
        return False

    def join(self) -> list[int]:
        """Let replaced ranks sample again and return them. Call it when no command is in flight.

        Their weights are not the current ones yet.
        """
        with self._lock:
            joined, self._ready = self._ready, []
            self.away -= set(joined)
            self.counts["sampling/joined"] += len(joined)
        for rank in joined:
            log.info("Worker rollout[%d] takes part again.", rank)
        return joined

    def reissue(self, count: int) -> None:
        """Count requests of a lost process that were sent to others."""
        with self._lock:
            self.counts["sampling/reissued"] += count

    def metrics(self) -> dict[str, float]:
        """Return the number of sampling ranks and the counts since the last call."""
        with self._lock:
            counted = {name: float(value) for name, value in self.counts.items()}
            self.counts = dict.fromkeys(COUNTS, 0)
            return counted | {"sampling/samplers": float(len(self.present))}

    def close(self) -> None:
        """Stop replacing processes: the run ends."""
        with self._lock:
            self._closing = True

    def settle(self) -> None:
        """Wait for the threads, after ``close`` and once the workers have ended."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in list(self._threads):
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _replace(self, old: WorkerHandle, number: int) -> None:
        """Start a process for a lost rank. A loss meanwhile reaches ``lost``, which replaces that process in turn."""
        old.kill()
        rank, worker = old.rank, None
        try:
            worker, order = self.begin(rank, number)
            worker.roles = ("rollout",)
            self.crew.admit(worker)
            self.crew.send({rank: order}, ("worker", "start"), deadline=self.start_limit).result()
        except Exception as error:
            if worker is not None:
                self.crew.dismiss(worker, "it could not be started")
                worker.kill()
            if not (self._closing or isinstance(error, WorkerLost)):  # ``lost`` handles a loss
                self.failure = error
                log.exception("Worker rollout[%d] cannot be replaced: %s", rank, error)
            return
        with self._lock:
            if self.crew.workers[rank] is worker and rank not in self.crew.absent:
                self._ready.append(rank)
