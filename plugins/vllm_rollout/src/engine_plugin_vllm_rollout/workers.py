"""Threads that ask a server: a run that is stopped does not wait for them.

consumes: jobs; waits for: jobs, and the server; unblocked by: ``submit``, the server's answers or time-outs, ``close``;
produces: results in futures.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Workers:
    """So many threads, started with the first job. They end with the process, in the middle of a job if need be.

    Args:
        count: jobs at the same time.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a job done; a future that is cancelled before its turn is left out."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, name=f"{self._name}-{i}", daemon=True)
                for i in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: job(*arguments)))
        return future

    def close(self) -> None:
        """No more jobs; those in hand are not waited for."""
        for _ in self._threads:
            self._jobs.put(None)
        self._threads = []

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = job()
            except BaseException as error:  # sent to the waiting caller
                future.set_exception(error)
            else:
                future.set_result(result)
