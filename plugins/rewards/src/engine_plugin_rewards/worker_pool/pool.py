"""The workers of one reward.

A request holds several samples. When its worker dies or exceeds the timeout, the current sample fails, the others are
sent again, and a new worker replaces the old one. A worker that was killed during its start is started again, as is a
replacement, at most ``START_ATTEMPTS`` times in a row.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from engine_core import errors, timeline
from engine_core.errors import DataError, PluginError
from engine_core.marked_processes import MARK, kill_marked
from engine_core.rewards.signatures import Outcome, Signature
from engine_plugin_processes.child import KEPT_LINES, ChildProcess, python_command
from engine_plugin_processes.json_channel import JsonChannel

if TYPE_CHECKING:
    from engine_core.rewards.models import OnFailure

STARTUP_SECONDS = 120.0  # imports of the plugin
START_ATTEMPTS = 3
GRACE_SECONDS = 1.0  # after the worker's own watchdog, which prints the stack of the function
WATCHDOG = "Timeout ("  # printed by faulthandler before it ends a worker
SHOWN_CHARACTERS = 3000
SAMPLES_PER_REQUEST = 32
SAMPLES_AT_ONCE = 64  # of an asynchronous function in singular form

logger = logging.getLogger("engine")

_ARRIVED = threading.Condition()
"""Notified of each message of a worker."""


class ReplyChannel(JsonChannel):
    """The channel to a worker; the code of a reward in the worker's process may write to it, too."""

    max_bytes = 16 * 2**20

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            ValueError: the message is no reply of a worker.
        """
        match super().receive():
            case (
                {"refused": str(), "message": str()}
                | {"ready": {}, "notes": [*_], "samples_per_timeout": None | int() | float()}
                | {"done": True}
                | {
                    "at": None | int(),
                    "outcome": {
                        "value": None | int() | float(), "failure": str(), "message": str(), "trace": str(),
                        "contract": bool(), "answer": None | str(),
                    },
                }
            ) as reply:  # fmt: skip
                return cast("dict[str, Any]", reply)
        raise ValueError("JSON that is no reply")


class Worker(ChildProcess):
    """A process and its current request.

    Args:
        order: the first message to the worker.
        attempt: number of this start, counted from the last success.
    """

    def __init__(self, order: Mapping[str, Any], attempt: int = 1) -> None:
        self.attempt, self.ready = attempt, False
        self.mark = uuid.uuid4().hex  # of what it starts
        self.starved = (
            False  # whether it ran out of memory, so that later samples could fail for what it has kept
        )
        self.job: Sequence[int] | None = None  # positions of the samples of its request
        self.seconds = 0.0  # that a call of its request may take
        self.since = time.monotonic()  # when the request was sent, or the last message came
        self.sent = 0.0  # when the request was sent, in the timeline's seconds
        self.messages: deque[dict[str, Any] | None] = deque()  # None: the worker has ended
        super().__init__(
            python_command("engine_plugin_rewards.worker_pool.worker:main"),
            ReplyChannel,
            take=self._take,
            env={**os.environ, MARK: self.mark},
        )
        self.send(order)

    def _take(self, message: dict[str, Any] | None) -> None:
        self.since = time.monotonic()
        with _ARRIVED:
            self.messages.append(message)
            _ARRIVED.notify_all()

    def stacks(self) -> str:
        """Return the worker's stack at its end (faulthandler prints the innermost frame first), else its last output."""
        text = self.tail(KEPT_LINES).strip()
        start = max(text.rfind(WATCHDOG), text.rfind("Fatal Python error"))
        return text[start:][:SHOWN_CHARACTERS] if start >= 0 else text[-SHOWN_CHARACTERS:]


class Pool:
    """A pool of the workers of one reward.

    Args:
        name: the reward.
        order: first message to each worker: ``reward``, ``options``, ``modules``, ``root``, ``allow_code``,
            ``timeout``, ``max_memory_gb``.
        size: number of workers.
    """

    def __init__(self, name: str, order: Mapping[str, Any], size: int) -> None:
        self.name, self.order, self.size = name, order, size
        self.timeout: float = order["timeout"]
        self.workers: list[Worker] = []
        self.signature: Signature | None = None
        self.samples_per_timeout: float | None = None  # scored by a call in one timeout; None: all
        self.columns: dict[str, list[Any]] = {}
        self.queue: deque[Sequence[int]] = deque()
        self.outcomes: list[Outcome | None] = []
        self.restarts = 0  # since the beginning

    @property
    def starting(self) -> bool:
        """Whether a worker is missing or not ready."""
        return len(self.workers) < self.size or not all(worker.ready for worker in self.workers)

    @property
    def pending(self) -> bool:
        """Whether a sample has no outcome, or a request has not ended."""
        # Every request must also have ended, or the next step would take its messages for its own.
        return None in self.outcomes or any(worker.job is not None for worker in self.workers)

    def begin(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        """Accept ``count`` samples; after ``drive``, ``outcomes`` has one for each."""
        self.expect(count)
        self.submit(range(count), columns)

    def expect(self, count: int) -> None:
        """Prepare for ``count`` samples, which ``submit`` adds in parts."""
        if self.pending:  # an earlier round was not finished
            self.abandon()
        self.columns, self.outcomes = {}, [None] * count

    def submit(self, places: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> None:
        """Add some of the expected samples.

        Args:
            places: their positions among all samples.
            columns: the arguments, a value for each of these samples.
        """
        assert self.signature is not None
        for name, values in columns.items():
            whole = self.columns.setdefault(name, [None] * len(self.outcomes))
            for place, value in zip(places, values, strict=True):
                whole[place] = value
        bounds = _bounds(self.signature, len(places), self.size)
        self.queue.extend(places[start:end] for start, end in itertools.pairwise(bounds))

    @property
    def busy(self) -> bool:
        """Whether a worker has a request, or could have one."""
        return bool(self.queue) or any(worker.job is not None for worker in self.workers)

    def tend(self, on_failure: OnFailure) -> None:
        """Read answers, replace dead and late workers, hand out requests.

        Raises:
            EngineError: a reward does not load, or its data cannot be sent to a worker.
        """
        for worker in list(self.workers):
            if dead := worker.popen.poll() is not None:
                worker.kill()  # also reads its last messages, which count
            while worker.messages:
                if (message := worker.messages.popleft()) is None:
                    dead = True
                else:
                    self._answer(worker, message, on_failure)
            if dead or self._late(worker):
                self._bury(worker, on_failure)
            elif worker.starved and worker.job is None:
                self._kill([worker])
                self.restarts += 1
            elif worker.ready and worker.job is None and self.queue:
                self._give(worker, self.queue.popleft())
        while len(self.workers) < self.size:
            self.workers.append(Worker(self.order))

    def _late(self, worker: Worker) -> bool:
        limit = worker.seconds + GRACE_SECONDS if worker.ready else STARTUP_SECONDS
        waiting = worker.job is not None or not worker.ready
        return waiting and time.monotonic() - worker.since > limit

    def _give(self, worker: Worker, job: Sequence[int]) -> None:
        columns = {name: [values[i] for i in job] for name, values in self.columns.items()}
        timeouts = 1 if self.samples_per_timeout is None else math.ceil(len(job) / self.samples_per_timeout)
        worker.seconds = timeouts * self.timeout
        try:
            worker.send({"count": len(job), "seconds": worker.seconds, "columns": columns})
        except TypeError as exc:
            raise DataError(
                f"Reward '{self.name}' needs data that cannot be sent to its worker: {exc}. Keep text, numbers, "
                "lists and tables in the rows, or set workers = 0."
            ) from exc
        worker.job, worker.since, worker.sent = job, time.monotonic(), timeline.now()

    def _answer(self, worker: Worker, message: dict[str, Any], on_failure: OnFailure) -> None:
        if "refused" in message:
            kind = getattr(errors, message["refused"], PluginError)
            raise kind(message["message"])
        if "ready" in message:
            worker.ready = True
            first, self.signature = self.signature is None, Signature(**message["ready"])
            self.samples_per_timeout = message["samples_per_timeout"]
            for line in message["notes"] if first else ():
                logger.info("%s", line)
        elif "done" in message:
            lane = f"{self.name} {self.workers.index(worker)}"
            timeline.add("rewards", lane, f"{len(worker.job or ())} samples", worker.sent)
            self._blame(worker, Outcome(None, "error", "its worker left it out"), on_failure)
            worker.job = None
        else:
            outcome = Outcome(**message["outcome"])
            worker.starved |= outcome.message.startswith("MemoryError")
            if message["at"] is None:
                self._blame(worker, outcome, on_failure)
            elif worker.job and 0 <= message["at"] < len(worker.job):
                self._settle(worker.job[message["at"]], outcome, on_failure)

    def _bury(self, worker: Worker, on_failure: OnFailure) -> None:
        if not (late := self._late(worker)):
            worker.ended(GRACE_SECONDS)  # a process that exits closes its connection first
        self._kill([worker])
        self.restarts += 1
        if not worker.ready:
            self._start_again(worker, late)
            return
        stacks = worker.stacks()
        # Its own watchdog was faster; in the middle of C code the watchdog may crash while it prints the stacks.
        late |= worker.popen.returncode in (1, -signal.SIGSEGV) and WATCHDOG in worker.tail(KEPT_LINES)
        message = f"no answer after {worker.seconds:g} s" if late else f"its worker {worker.ending()}"
        outcome = Outcome(None, "timeout" if late else "error", message, stacks)
        self._blame(worker, outcome, on_failure)

    def _start_again(self, worker: Worker, late: bool) -> None:
        """Replace a worker that ended before it was ready.

        Raises:
            PluginError: another worker would fail, too: no worker of this reward was ever ready and no signal killed
                this one, or this was the last attempt.
        """
        hopeless = self.signature is None and (late or worker.popen.returncode >= 0)
        if hopeless or worker.attempt >= START_ATTEMPTS:
            raise PluginError(
                f"Reward '{self.name}' does not start: its worker {worker.ending()}.\n{worker.stacks()}"
            )
        logger.warning(
            "A worker of reward '%s' %s while it started. Started again.", self.name, worker.ending()
        )
        self.workers.append(Worker(self.order, worker.attempt + 1))

    def _blame(self, worker: Worker, outcome: Outcome, on_failure: OnFailure) -> None:
        """Fail the sample at which a request failed; if it is unknown, send each sample again in its own request."""
        assert self.signature is not None
        left = [position for position in worker.job or () if self.outcomes[position] is None]
        worker.job = ()  # the message of its end is still to come
        if not left:
            return
        if self.signature.streams:
            failed, again = left[:1], [left[1:]] if left[1:] else []
        elif self.signature.whole_batch or outcome.contract or len(left) == 1:
            failed, again = left, []
        else:
            failed, again = [], [[position] for position in left]
        self.queue.extendleft(reversed(again))
        for position in failed:
            self._settle(position, outcome, on_failure)

    def _settle(self, position: int, outcome: Outcome, on_failure: OnFailure) -> None:
        self.outcomes[position] = outcome
        if outcome.failure:
            on_failure(self.name, position, outcome)

    def abandon(self) -> None:
        """Discard unfinished samples; a worker with a request is killed."""
        self.queue.clear()
        self.outcomes = []
        self._kill([worker for worker in self.workers if worker.job is not None])

    def close(self) -> None:
        """End the workers, and what they started in other sessions."""
        self._kill(self.workers)

    def _kill(self, workers: Sequence[Worker]) -> None:
        """Kill and remove workers, and what they started in other sessions."""
        for worker in workers:
            worker.kill()
        if workers:
            kill_marked({worker.mark for worker in workers})
        self.workers = [worker for worker in self.workers if worker not in workers]


def wait(pools: Sequence[Pool], seconds: float) -> None:
    """Wait at most ``seconds`` for a message of a worker, or its end."""
    with _ARRIVED:
        _ARRIVED.wait_for(lambda: any(worker.messages for pool in pools for worker in pool.workers), seconds)


def _bounds(signature: Signature, count: int, workers: int) -> list[int]:
    """Return where to cut ``count`` samples into requests, of at most ``SAMPLES_PER_REQUEST`` in plural form.

    There a request of one sample would hide a function that returns one number for all samples, so every request has at
    least two samples if possible.
    """
    if signature.whole_batch:
        requests = 1
    elif signature.streams:
        requests = math.ceil(count / min(SAMPLES_PER_REQUEST, math.ceil(count / (2 * workers)) or 1))
    elif signature.per_sample:
        requests = math.ceil(count / min(SAMPLES_AT_ONCE, math.ceil(count / workers) or 1))
    else:
        spread = count // max(2, math.ceil(count / workers)) or 1
        requests = max(spread, math.ceil(count / SAMPLES_PER_REQUEST))
    return [round(i * count / requests) for i in range(requests + 1)] if count else [0]
