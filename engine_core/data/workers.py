"""Rows tokenised ahead by other processes.

A worker is this module run by a fresh interpreter. It is told once what to read and with which
tokenizer, then answers row numbers with outcomes, all as lines of JSON over its pipes: no code and no
pickle crosses, a user's main script is not imported again, and a worker ends when its pipe closes.

Reader threads (one a worker): consume the worker's pipe; wait for its lines; unblocked by a line or by
the worker's end; produce entries of one inbox. `results` alone consumes the inbox and writes to workers.

A dead worker is started again and its rows are done again, once. Rows that cost two workers end the run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.errors import DataError, WorkerLost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Answers = list[dict[str, Any]]


@dataclass(slots=True)
class Job:
    """Rows that one worker is doing, and how many workers have tried."""

    rows: list[int]
    worker: int
    attempts: int = 1


class Worker:
    """One process and the thread that reads what it writes."""

    def __init__(self, rank: int, setup: str, inbox: queue.Queue[tuple[Worker, str]]) -> None:
        self.rank, self.inbox = rank, inbox
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path if folder)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        )
        self.send(setup)
        threading.Thread(target=self._read, name=f"data-worker-{rank}", daemon=True).start()

    def send(self, line: str) -> None:
        """Write one line; a worker that is gone is noticed by its reader."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            logger.debug("data worker %d does not listen any more", self.rank)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.inbox.put((self, line))
        self.process.wait()
        self.inbox.put((self, ""))

    def cause(self) -> str:
        """How the process ended, in words."""
        code = self.process.wait()
        return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it exited with code {code}"


class WorkerPool:
    """Prepares lists of rows in ``num_workers`` processes and gives them back in order.

    Args:
        setup: what `serve` needs, as plain values.
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
        self.num_workers, self.ahead, self.where = num_workers, ahead, where
        self.restarts = 0
        self._folder = tempfile.mkdtemp(prefix="engine-tokenizer-")
        tokenizer.save_pretrained(self._folder)
        self._setup = json.dumps({**setup, "tokenizer": self._folder})
        self._inbox: queue.Queue[tuple[Worker, str]] = queue.Queue()
        self._numbers = itertools.count()
        self._workers: list[Worker] = []
        self.close = weakref.finalize(self, _end, self._workers, self._folder)

    def results(self, chunks: Iterator[list[int]]) -> Iterator[Answers]:
        """The answers to each list of ``chunks``, in their order. One such iterator at a time.

        Raises:
            DataError: a worker could not start on these files and this tokenizer.
            WorkerLost: one list of rows cost two workers.
        """
        if not self._workers:
            self._workers += [Worker(rank, self._setup, self._inbox) for rank in range(self.num_workers)]
        jobs: dict[int, Job] = {}  # in the order of `chunks`
        done: dict[int, Answers] = {}
        while True:
            while len(jobs) < self.num_workers * self.ahead and (rows := next(chunks, None)) is not None:
                load = [sum(job.worker == rank for job in jobs.values()) for rank in range(self.num_workers)]
                number = next(self._numbers)
                jobs[number] = Job(rows, load.index(min(load)))
                self._assign(number, jobs[number])
            if not jobs:
                return
            first = next(iter(jobs))
            while first not in done:
                self._receive(jobs, done)
            del jobs[first]
            yield done.pop(first)

    def _assign(self, number: int, job: Job) -> None:
        self._workers[job.worker].send(json.dumps({"job": number, "rows": job.rows}))

    def _receive(self, jobs: dict[int, Job], done: dict[int, Answers]) -> None:
        worker, line = self._inbox.get()
        if worker is not self._workers[worker.rank]:
            return  # the last words of one that was replaced
        try:
            message = json.loads(line)
        except ValueError:  # "" at its end, or half a line
            if line == "":
                self._replace(
                    worker, {n: job for n, job in jobs.items() if job.worker == worker.rank and n not in done}
                )
            return
        if "problem" in message:
            raise DataError(f"Data worker {worker.rank}: {message['problem']}")
        if "bug" in message:
            raise RuntimeError(f"Data worker {worker.rank} failed:\n{message['bug']}")
        if message["job"] in jobs:  # else: asked for before a resume
            done[message["job"]] = message["answers"]

    def _replace(self, worker: Worker, lost: dict[int, Job]) -> None:
        cause, doing = worker.cause(), "nothing"
        if lost:
            rows = next(iter(lost.values())).rows
            doing = f"rows from {self.where(rows[0])} to {self.where(rows[-1])}"
        if any(job.attempts > 1 for job in lost.values()):
            raise WorkerLost(
                "data", worker.rank, socket.gethostname(),
                f"{cause} while it did {doing}, which had ended a worker before. Look at these rows, or "
                "for too little memory; num_workers = 0 in [data] shows the failure itself.",
            )  # fmt: skip
        self.restarts += 1
        logger.warning("Data worker %d: %s while it did %s. Started again.", worker.rank, cause, doing)
        self._workers[worker.rank] = Worker(worker.rank, self._setup, self._inbox)
        for number, job in lost.items():
            job.attempts += 1
            self._assign(number, job)


def _end(workers: list[Worker], folder: str) -> None:
    for worker in workers:
        worker.process.kill()
        worker.process.wait()
        assert worker.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # words it never read
            worker.process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)


def serve() -> None:
    """A worker's life: one line of setup, then a line of answers for each line of rows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides when to end
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        from engine_core.data.prepare import Preparer

        preparer = Preparer.from_setup(json.loads(sys.stdin.readline()))
        for line in sys.stdin:
            job = json.loads(line)
            say({"job": job["job"], "answers": [preparer.prepare(row).to_json() for row in job["rows"]]})
    except BrokenPipeError:
        pass  # the controller is gone
    except DataError as error:
        say({"problem": str(error)})
    except Exception:
        say({"bug": traceback.format_exc()})


if __name__ == "__main__":
    serve()
