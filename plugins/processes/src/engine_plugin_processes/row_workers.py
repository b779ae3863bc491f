"""Tokenization of rows ahead of their use, by other processes.

A worker is a fresh interpreter that runs `serve`. Its first message says what to read and with which tokenizer. It
then answers row numbers with outcomes, in JSON: no code and no pickle is sent.

A dead worker is started again and its rows are retried once. Rows that end two workers end the run.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import signal
import socket
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.config.models import DataConfig
from engine_core.data import tokenizer_hash
from engine_core.data.rows import Rows
from engine_core.errors import DataError, WorkerLost
from engine_core.runs.logs import FILE_ONLY
from engine_core.specs import resolve
from engine_core.temporary_folder import TemporaryFolder
from engine_plugin_processes.child import ChildProcess, print_stacks_on_request, python_command
from engine_plugin_processes.json_channel import Closed, JsonChannel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_core.data.source import Preparer

log = logging.getLogger("engine")

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # about the missing torch, which `serve` hides
}

Answers = list[dict[str, Any]]


@dataclass(slots=True)
class Job:
    """The rows of one message to a worker, the number of attempts, and the answers."""

    rows: list[int]
    attempts: int = 1
    answers: Answers | None = None


class Worker(ChildProcess):
    """A process, its unanswered jobs in order, and its messages, with None at the end."""

    def __init__(self, rank: int, setup: dict[str, Any]) -> None:
        self.rank = rank
        self.jobs: deque[Job] = deque()
        self.messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        super().__init__(
            python_command(f"{__name__}:serve"),
            JsonChannel,
            take=self.messages.put,
            on_line=lambda line: log.info("data worker %d printed: %s", rank, line, extra=FILE_ONLY),
            env={**os.environ, **ENVIRONMENT},
        )
        self.send(setup)

    def give(self, job: Job) -> None:
        """Send the rows of ``job``, whose answers come after those of the jobs before it."""
        self.jobs.append(job)
        self.send(job.rows)


class WorkerPool:
    """A pool of ``num_workers`` processes that prepare lists of rows, whose results come in order.

    Args:
        setup: of `Preparer.setup`.
        tokenizer: saved to a temporary folder, from which each worker loads it.
        num_workers: processes.
        ahead: lists of rows that each worker receives in advance.
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
        self._folder = TemporaryFolder("tokenizer-")
        tokenizer.save_pretrained(self._folder.path)
        self._setup = {**setup, "tokenizer": self._folder.path}
        self._workers = [Worker(rank, self._setup) for rank in range(num_workers)]
        self.close = weakref.finalize(self, _end, self._workers, self._folder)

    def results(self, chunks: Iterator[list[int]]) -> Iterator[Answers]:
        """Yield the answers to each list of ``chunks``, in their order. Only one such iterator may run at a time.

        Raises:
            DataError: a worker could not start on these files and this tokenizer.
            WorkerLost: one list of rows ended two workers.
            RuntimeError: a worker failed by a bug.
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
        message = worker.messages.get()
        if message is None:
            self._replace(worker)
        elif "problem" in message:
            raise DataError(f"Data worker {worker.rank}: {message['problem']}")
        elif "bug" in message:
            raise RuntimeError(f"Data worker {worker.rank} failed:\n{message['bug']}")
        else:
            worker.jobs.popleft().answers = message["answers"]

    def _replace(self, worker: Worker) -> None:
        doing = "nothing"
        if worker.jobs:
            rows = worker.jobs[0].rows
            doing = f"rows from {self._where(rows[0])} to {self._where(rows[-1])}"
        cause = worker.report(f"it {worker.ending()} while it did {doing}")
        worker.kill()
        if any(job.attempts > 1 for job in worker.jobs):
            raise WorkerLost(
                "data", worker.rank, socket.gethostname(),
                f"{cause} These rows had ended a worker before: look at them, or for too little memory; "
                "num_workers = 0 in [data] shows the failure itself.",
            )  # fmt: skip
        self.restarts += 1
        log.warning("Data worker %d is started again: %s", worker.rank, cause)
        self._workers[worker.rank] = fresh = Worker(worker.rank, self._setup)
        for job in worker.jobs:
            job.attempts += 1
            fresh.give(job)


def _end(workers: list[Worker], folder: TemporaryFolder) -> None:
    for worker in workers:
        worker.kill()
    folder.remove()


def serve(number: int) -> None:
    """Serve as a worker: a message of setup, then a message of answers for each message of rows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides when to end
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers do not need it, and its import takes seconds
    print_stacks_on_request()
    channel = JsonChannel(socket.socket(fileno=number))
    try:
        preparer = preparer_of(channel.receive())
        while True:
            rows = channel.receive()
            channel.send({"answers": [dataclasses.asdict(preparer.prepare(row)) for row in rows]})
    except Closed:
        pass  # the controller is gone
    except DataError as error:
        channel.send({"problem": str(error)})
    except Exception:
        channel.send({"bug": traceback.format_exc()})


def preparer_of(setup: Mapping[str, Any]) -> Preparer:
    """Build the preparer of a worker.

    Args:
        setup: of `Preparer.setup`; ``tokenizer`` is a folder.

    Raises:
        DataError: the saved tokenizer differs from the run's.
    """
    import transformers

    # The tokenizer's class is faster if the library has it: AutoTokenizer imports the configs of all models.
    kind = getattr(transformers, setup["tokenizer_class"], None) or transformers.AutoTokenizer
    tokenizer = kind.from_pretrained(setup["tokenizer"], local_files_only=True)
    if tokenizer_hash(tokenizer) != setup["tokenizer_hash"]:
        raise DataError("the tokenizer changes when it is saved and loaded. Set num_workers = 0 in [data].")
    tokenizer.name_or_path = setup["model"]
    rows, make = Rows(setup["files"], setup["cache"]), resolve(setup["preparer"])
    made: Preparer = make(rows, tokenizer, DataConfig.model_validate(setup["config"]), *setup["plain"])
    return made
