"""Writes of a run that must not end it: what a full disk refuses is kept, and tried again before the next one.

A checkpoint is only written once nothing waits any more, so that none outlives the metrics and rollouts of
its steps.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_core import faults
from engine_core.errors import EnvironmentProblem

log = logging.getLogger("engine")

MOST = 16  # large writes that wait at one time; lines of metrics are small, and as many as there are


class PendingWrites:
    """Writes in the order in which they were asked for; none is made before the one that waits."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, bool, Callable[[], Any]]] = deque()

    def do(self, what: str, write: Callable[[], Any], small: bool = False) -> None:
        """Write now, after what waits; what fails waits.

        Args:
            what: the thing that is written, for messages: ``the metrics of step 7``.
            write: leaves nothing behind when it raises ``OSError``.
            small: any number may wait.

        Raises:
            EnvironmentProblem: too much waits. It is kept.
        """
        waited = len(self._waiting)
        self._waiting.append((what, small, write))
        try:
            self.flush()
        except OSError as error:
            if not waited:
                log.warning(
                    "%s cannot be written: %s. It is kept in memory and written when there is room; no checkpoint is "
                    "saved before.",
                    _capital(what),
                    error,
                )
            if sum(not small for _, small, _ in self._waiting) > MOST:
                raise EnvironmentProblem(self._refused(error)) from error

    def flush(self) -> None:
        """Write what waits.

        Raises:
            OSError: it still cannot be written; it waits on.
            Exception: what else a write raises; that one would fail again, and waits no more.
        """
        count = len(self._waiting)
        while self._waiting:
            try:
                self._waiting[0][2]()
            except OSError:
                raise
            except Exception:
                self._waiting.popleft()
                raise
            self._waiting.popleft()
        if count > 1:
            log.info("What could not be written before is written now: %d writes.", count)

    def finish(self) -> None:
        """Write what waits, for there is no next time.

        Raises:
            EnvironmentProblem: it cannot be written.
        """
        try:
            self.flush()
        except OSError as error:
            raise EnvironmentProblem(self._refused(error)) from error

    @property
    def waiting(self) -> list[str]:
        """What waits."""
        return [what for what, _, _ in self._waiting]

    def _refused(self, error: OSError) -> str:
        first, more = self.waiting[0], len(self.waiting) - 1
        others = f" and {more} more" if more else ""
        return (
            f"{_capital(first)}{others} could not be written: {error}. Free some space; the run goes on from its last "
            "checkpoint with `engine resume`."
        )


class LineFile:
    """A file of lines, each of which is there whole or not at all.

    Args:
        path: of a file that is appended to.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, line: str) -> None:
        """Write a line at the end; when that fails the file is as it was.

        Raises:
            OSError: it cannot be written.
        """
        data = line.encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            self._write(data[: len(data) // 2])
            faults.point("metrics.half_written")
            self._write(data[len(data) // 2 :])
        except BaseException:  # a stop by the keyboard too: the line is tried again at the end
            self._file.truncate(end)
            raise

    def _write(self, data: bytes) -> None:
        while data:  # a disk that is nearly full takes some of it
            data = data[self._file.write(data) or 0 :]

    def sync(self) -> None:
        """Bring it to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
