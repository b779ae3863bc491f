"""Samplers that come and go one by one: lost and replaced, or more and fewer of them as the user asks while the run goes on.

A process comes in the background and takes part from the next update of weights on, which brings it the current ones;
one leaves at an update, when it has told what it had finished. Only where the sampler has a pool of its own; each of its
processes is then a world of its own for ``torch.distributed``, since a world cannot lose a rank, or get one, and go on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.errors import WorkerLost
from engine_plugin_processes.worker_pool import message_to

if TYPE_CHECKING:
    from engine_plugin_processes.worker_pool import WorkerPool
    from engine_plugin_processes.worker_process import WorkerHandle

log = logging.getLogger("engine")

LEAVE_SECONDS = 60.0  # for one that leaves to come to the end of what it is at
END_SECONDS = 10.0  # for its process to end by itself then
CLOSE_SECONDS = 5.0  # for threads, once the run has ended

Begin = Callable[[int, int, Callable[[], bool]], "tuple[WorkerHandle, Mapping[str, Any]]"]
"""Starts a process for a rank, the how manieth of them, and gives its first command; raises ``Withdrawn`` where what the last
argument asks, whether it is still wanted, has become False. May take long."""


class Withdrawn(Exception):
    """A process that is not there yet is not wanted any more."""


class Coming:
    """A process that is begun and does not sample yet."""

    def __init__(self) -> None:
        self.worker: WorkerHandle | None = None  # once it can be told something
        self._withdrawn = threading.Event()

    @property
    def wanted(self) -> bool:
        """Whether it may still come."""
        return not self._withdrawn.is_set()

    def withdraw(self) -> None:
        """It is not to come."""
        self._withdrawn.set()


class Replacements:
    """Who of the sampler's ranks is there.

    consumes: losses, from ``lost``, and how many are wanted, from ``want``; waits for: new processes, each in a thread of its
    own; unblocked by: their answers; produces: ranks that are there, and others that are not, in ``change``.

    Args:
        crew: all workers.
        ranks: of the run, of the sampler's pool, with those that may come.
        budget: processes that may be replaced in the run's session.
        key: where the user says so.
        begin: see ``Begin``.
        start_seconds: for a new process to build its engine.
        started: those of ``ranks`` that are there from the beginning; default: all.
        ended: is told, in a thread, of a rank whose process has ended and which has no other now.
    """

    def __init__(
        self,
        crew: WorkerPool,
        ranks: Sequence[int],
        budget: int,
        key: str,
        begin: Begin,
        start_seconds: float,
        started: Collection[int] | None = None,
        ended: Callable[[int], None] = lambda rank: None,
        changeable: bool = False,
    ) -> None:
        self.crew, self.ranks, self.budget, self.key = crew, tuple(ranks), budget, key
        self.begin, self.start_seconds, self.ended, self.changeable = begin, start_seconds, ended, changeable
        there = set(self.ranks if started is None else started)
        self.wanted = len(there)
        self.away = set(self.ranks) - there  # lost, or not there yet, or not any more
        names = ("lost", "joined", "left", "reissued")
        self.counts = dict.fromkeys((f"sampling/{name}" for name in names), 0)
        self.losses = dict.fromkeys(self.ranks, 0)  # of each rank, so far; one that has left counts too
        self._used = self._begun = 0
        self._coming: dict[int, Coming] = {}
        self._ready: list[int] = []  # of these, those that could sample
        self._leaving: set[int] = set()  # they are asked to
        self._threads: dict[int, threading.Thread] = {}  # of each rank, the newest
        self._closing = False
        self._lock = threading.RLock()

    @property
    def present(self) -> list[int]:
        """Ranks that sample."""
        with self._lock:
            return [rank for rank in self.ranks if rank not in self.away]

    def lost(self, worker: WorkerHandle, loss: WorkerLost) -> bool:
        """Whether the run goes on without this worker; then another is begun in its place, as far as the budget goes."""
        rank = worker.rank
        with self._lock:
            others = [other for other in self.present if other != rank and other not in self._leaving]
            again = self._used < self.budget
            if rank not in self.ranks or not others or not (again or self.changeable):
                return False
            self.away.add(rank)
            if rank in self._leaving:
                return True
            self.losses[rank] += 1
            self.counts["sampling/lost"] += 1
            self._forget(rank)
            self._used += again
            number = self._used
            if again:
                self._coming[rank] = Coming()
            else:
                self._want_no_more()
        if again:
            log.warning(
                "%s The others go on with what it had not finished; it is replaced (%d of %d, %s).",
                loss, number, self.budget, self.key,
            )  # fmt: skip
            self._thread(rank, self._replace, worker, number)
        else:
            log.warning(
                "%s The others go on with what it had not finished. Samplers wanted now: %d; 'engine scale' brings others.",
                loss, self.wanted,
            )  # fmt: skip
            self._thread(rank, self._end, worker)
        return True

    def want(self, count: int) -> None:
        """Have so many sample: others are begun at once, and take part or leave in ``change``.

        Args:
            count: at least 1, at most all ranks.
        """
        with self._lock:
            self.wanted = count
            there = len(self.present)
        log.info("Samplers: %d wanted, %d there.", count, there)
        self._adjust()

    def change(self) -> bool:
        """Take in who has come, and let go who is not wanted; whether somebody has come. Called when nobody samples.

        The weights of those that have come are not the current ones yet.
        """
        self._adjust()
        joined = self.join()
        with self._lock:
            present = self.present
            leaving = present[max(self.wanted, 1) :]
        if leaving:
            self._let_go(leaving)
        return joined

    def join(self) -> bool:
        """Take in who has come; whether somebody has."""
        with self._lock:
            joined, self._ready = self._ready, []
            for rank in joined:
                self._coming.pop(rank, None)
            self.away -= set(joined)
            self.counts["sampling/joined"] += len(joined)
        for rank in joined:
            again = " again" if self.losses[rank] else ""
            log.info("Worker rollout[%d] takes part%s, from this update of weights on.", rank, again)
        return bool(joined)

    def reissue(self, count: int) -> None:
        """So many requests of a process that is gone were given to others."""
        with self._lock:
            self.counts["sampling/reissued"] += count

    def metrics(self) -> dict[str, float]:
        """How many are there; what has happened since it was last asked."""
        with self._lock:
            told = {name: float(value) for name, value in self.counts.items()}
            self.counts = dict.fromkeys(self.counts, 0)
            return told | {"sampling/samplers": float(len(self.present))}

    def close(self) -> None:
        """Nobody is wanted any more: the run ends."""
        with self._lock:
            self._closing = True
            coming = list(self._coming.values())
        self._withdraw(coming)

    def settle(self) -> None:
        """After ``close``, once the crew has ended: wait for the threads."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in list(self._threads.values()):
            thread.join(max(deadline - time.monotonic(), 0.0))

    # -- more, and fewer ----------------------------------------------------

    def _adjust(self) -> None:
        """Begin who is missing, the lowest ranks first; withdraw who is too many and is not there yet, the highest first."""
        with self._lock:
            coming = [rank for rank, each in self._coming.items() if each.wanted]
            surplus = len(self.present) + len(coming) - self.wanted
            not_wanted = sorted(coming, reverse=True)[: max(surplus, 0)]
            withdrawn = [self._coming[rank] for rank in not_wanted if rank not in self._ready]
            idle = [rank for rank in not_wanted if rank in self._ready]
            for rank in idle:
                self._forget(rank)
            free = [rank for rank in self.ranks if rank in self.away and rank not in {*self._coming, *idle}]
            missing = [] if self._closing else free[: max(-surplus, 0)]
            self._coming |= {rank: Coming() for rank in missing}
            numbers = {rank: self._count() for rank in missing}
        self._withdraw(withdrawn)
        for rank in idle:
            self._dismiss(rank)
        for rank, number in numbers.items():
            log.info(
                "A sampler more is begun, rollout[%d]; it takes part from an update of weights on.", rank
            )
            self._thread(rank, self._bring, rank, number)

    def _withdraw(self, coming: Sequence[Coming]) -> None:
        """Have these not come; their threads end them."""
        for each in coming:
            each.withdraw()
            if each.worker is not None:
                self.crew.dismiss(each.worker, "it is not wanted any more")

    def _let_go(self, ranks: Sequence[int]) -> None:
        """Have these end once they have told what they had finished; the rest is for the others."""
        with self._lock:
            self._leaving |= set(ranks)
        told = []
        for rank in ranks:
            number = self.crew.next_number()  # the answer comes after what it says of earlier commands
            message = {rank: message_to(number, "memory")}
            told.append(self.crew.send(message, ("rollout", "leave"), number, deadline=LEAVE_SECONDS))
        for answer in told:
            with contextlib.suppress(WorkerLost):  # it was to go
                answer.result()
        with self._lock:
            self._leaving -= set(ranks)
            self.away |= set(ranks)
            for rank in ranks:
                self.losses[rank] += 1
            self.counts["sampling/left"] += len(ranks)
        for rank in ranks:
            log.info("Worker rollout[%d] leaves, as was asked for.", rank)
            self._dismiss(rank)

    def _dismiss(self, rank: int) -> None:
        """End the process of a rank that does not sample."""
        worker = self.crew.workers[rank]
        self.crew.dismiss(worker, "it was asked to leave")
        self._thread(rank, self._end, worker)

    def _forget(self, rank: int) -> None:
        """Within the lock: whatever of this rank was coming does not come."""
        if (coming := self._coming.pop(rank, None)) is not None:
            coming.withdraw()
        self._ready = [other for other in self._ready if other != rank]

    def _want_no_more(self) -> None:
        """Within the lock: one that did not stay is not begun anew at each update, unless the user asks for it."""
        coming = sum(each.wanted for each in self._coming.values())
        self.wanted = max(min(self.wanted, len(self.present) + coming), 1)

    def _count(self) -> int:
        self._begun += 1
        return self._begun

    # -- in threads ---------------------------------------------------------

    def _thread(self, rank: int, do: Callable[..., None], *arguments: Any) -> None:
        """Do it once what was to be done about this rank before is done."""
        with self._lock:
            before = self._threads.get(rank)

            def in_turn() -> None:
                if before is not None:
                    before.join()
                do(*arguments)

            self._threads[rank] = threading.Thread(target=in_turn, name="replace", daemon=True)
            self._threads[rank].start()

    def _end(self, worker: WorkerHandle) -> None:
        """Nothing of a process is left."""
        worker.ask_to_end()
        if not worker.ended(END_SECONDS):
            log.warning("Worker rollout[%d] did not end by itself and is killed.", worker.rank)
        worker.kill()
        self.ended(worker.rank)

    def _replace(self, old: WorkerHandle, number: int) -> None:
        """One process in the place of another that was lost."""
        old.kill()
        with self._lock:
            begun = self._count()
        self._bring(old.rank, begun)

    def _bring(self, rank: int, number: int) -> None:
        """One new process, to where it could sample."""
        with self._lock:
            coming = self._coming.get(rank)
        if coming is None:
            return
        try:
            self._start(rank, number, coming)
        except (WorkerLost, Withdrawn):  # a loss was told, and it is replaced again as far as the budget goes
            coming.withdraw()
        except Exception as error:
            if coming.wanted:
                log.exception(
                    "Worker rollout[%d] cannot be %s (%s); the others go on.",
                    rank, "replaced" if self.losses[rank] else "begun", error,
                )  # fmt: skip
            with self._lock:
                coming.withdraw()
                self._want_no_more()
        with self._lock:
            mine = self._coming.get(rank) is coming
            if mine and coming.wanted:
                self._ready.append(rank)
                return
        self._give_up(rank, coming, mine)

    def _start(self, rank: int, number: int, coming: Coming) -> None:
        worker, order = self.begin(rank, number, lambda: coming.wanted)
        worker.roles = ("rollout",)
        coming.worker = worker
        self.crew.admit(worker)
        if not coming.wanted:
            raise Withdrawn
        command = self.crew.next_number()
        self.crew.send(
            {rank: {**order, "id": command}},
            ("worker", "start"),
            command,
            deadline=self.start_seconds,
        ).result()

    def _give_up(self, rank: int, coming: Coming, mine: bool) -> None:
        """What was begun does not come.

        Args:
            rank: of the run.
            coming: its process.
            mine: nothing else was begun for the rank meanwhile.
        """
        if coming.worker is not None:
            self.crew.dismiss(coming.worker, "it is not wanted any more")
            coming.worker.kill()
        if mine:
            with self._lock:
                self._forget(rank)
            self.ended(rank)
