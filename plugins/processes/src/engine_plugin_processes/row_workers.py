"""Rows tokenised ahead by other processes.

A worker is a fresh interpreter that runs `serve`. It is told once what to read and with which tokenizer,
then answers row numbers with outcomes, all as lines of JSON over its pipes: no code and no pickle crosses,
a user's main script is not imported again, and a worker ends when its pipe closes.

A dead worker is started again and its rows are done again, once. Rows that cost two workers end the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from engine_core.errors import DataError, WorkerLost
from engine_core.inherited_descriptors import close_in_children
from engine_core.temporary_folder import TemporaryFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Answers = list[dict[str, Any]]


@dataclass(slots=True)
class Job:
    """Rows that one worker is to do, how many have tried, and what came of it."""

    rows: list[int]
    attempts: int = 1
    answers: Answers | None = None


class Worker:
    """One process, its unanswered jobs in order, and the thread that reads what it writes.

    The thread consumes: the process's pipe; waits for: its lines; unblocked by: a line or the process's
    end; produces: entries of `lines`, with "" at the end.
    """

    def __init__(self, rank: int, setup: str) -> None:
        self.rank = rank
        self.jobs: deque[Job] = deque()
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path if folder)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={
                **os.environ,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # that there is no torch, see `serve`
            },
        )
        self.stdin, self.stdout = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        close_in_children(
            cast(Any, self.stdin).buffer.raw
        )  # without what is buffered: a fork must not write it too
        self._send(setup)
        threading.Thread(target=self._read, name=f"data-worker-{rank}", daemon=True).start()

    def give(self, job: Job) -> None:
        """Ask for the rows of ``job``, whose answers are the first of ``lines`` that no earlier job has."""
        self.jobs.append(job)
        self._send(json.dumps(job.rows))

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is gone, which its reader notices
            self.stdin.write(line + "\n")
            self.stdin.flush()

    def _read(self) -> None:
        with self.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # else it died while writing
                    self.lines.put(line)
        self.process.wait()
        self.lines.put("")

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):  # words it never read
            self.stdin.close()


class WorkerPool:
    """Prepares lists of rows in ``num_workers`` processes and gives them back in order.

    Args:
        setup: of `Preparer.setup`.
        tokenizer: saved to a temporary folder, from which each worker loads it.
        num_workers: processes.
        ahead: lists of rows that each worker is given in advance.
        where: names a row for messages.
    """

    def __init__(
        self,
        setup: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        num_workers: int,
        ahead: int,
        where: Callable[[int], str],
    ) -> None:
        self._most_jobs, self._where = num_workers * ahead, where
        self.restarts = 0
        self._folder = TemporaryFolder("engine-tokenizer-")
        tokenizer.save_pretrained(self._folder.path)
        self._setup = json.dumps({**setup, "tokenizer": self._folder.path})
        self._workers = [Worker(rank, self._setup) for rank in range(num_workers)]
        self.close = weakref.finalize(self, _end, self._workers, self._folder)

    def results(self, chunks: Iterator[list[int]]) -> Iterator[Answers]:
        """The answers to each list of ``chunks``, in their order. One such iterator at a time.

        Raises:
            DataError: a worker could not start on these files and this tokenizer.
            WorkerLost: one list of rows cost two workers.
        """
        given: deque[tuple[int, Job]] = deque()  # rank of the worker
        while True:
            while len(given) < self._most_jobs and (rows := next(chunks, None)) is not None:
                worker, job = min(self._workers, key=lambda worker: len(worker.jobs)), Job(rows)
                worker.give(job)
                given.append((worker.rank, job))
            if not given:
                return
            rank, job = given.popleft()
            while job.answers is None:
                self._receive(self._workers[rank])
            yield job.answers

    def _receive(self, worker: Worker) -> None:
        line = worker.lines.get()
        if not line:
            self._replace(worker)
            return
        message = json.loads(line)
        if "problem" in message:
            raise DataError(f"Data worker {worker.rank}: {message['problem']}")
        if "bug" in message:
            raise RuntimeError(f"Data worker {worker.rank} failed:\n{message['bug']}")
        worker.jobs.popleft().answers = message["answers"]

    def _replace(self, worker: Worker) -> None:
        code, doing = worker.process.wait(), "nothing"
        cause = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it exited with code {code}"
        if worker.jobs:
            rows = worker.jobs[0].rows
            doing = f"rows from {self._where(rows[0])} to {self._where(rows[-1])}"
        if any(job.attempts > 1 for job in worker.jobs):
            raise WorkerLost(
                "data", worker.rank, socket.gethostname(),
                f"{cause} while it did {doing}, which had ended a worker before. Look at these rows, or "
                "for too little memory; num_workers = 0 in [data] shows the failure itself.",
            )  # fmt: skip
        self.restarts += 1
        logger.warning("Data worker %d: %s while it did %s. Started again.", worker.rank, cause, doing)
        worker.end()
        self._workers[worker.rank] = fresh = Worker(worker.rank, self._setup)
        for job in worker.jobs:
            job.attempts += 1
            fresh.give(job)


def _end(workers: list[Worker], folder: TemporaryFolder) -> None:
    for worker in workers:
        worker.end()
    folder.remove()


def serve() -> None:
    """A worker's life: one line of setup, then a line of answers for each line of rows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides when to end
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers need none, and importing it takes seconds
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        from engine_core.data.source import Preparer

        preparer = Preparer.from_setup(json.loads(sys.stdin.readline()))
        for line in sys.stdin:
            say({"answers": [dataclasses.asdict(preparer.prepare(row)) for row in json.loads(line)]})
    except BrokenPipeError:
        pass  # the controller is gone
    except DataError as error:
        say({"problem": str(error)})
    except Exception:
        say({"bug": traceback.format_exc()})
