"""The launcher of a suite's workers: starts them once, has them run cases, and ends them in any case.

If a rank dies, or does not answer by the deadline, the case fails with its exit code, its last lines and its stacks.
The group is started again for the next case, up to ``MOST_LOSSES`` times.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from engine_plugin_testing import forking

START_SECONDS = 300.0
STRAGGLER_SECONDS = 20.0  # for the other ranks once one has failed: they may wait for it forever
MOST_LOSSES = 4
SHOWN_CHARACTERS = 4000


class CaseFailed(AssertionError):
    """An error: a contract does not hold, or a worker was lost.

    Args:
        message: what happened.
        crashed: the cause is not a failed assertion but another exception, or a lost worker.
    """

    def __init__(self, message: str, crashed: bool = True) -> None:
        self.crashed = crashed
        super().__init__(message)


class _Rank:
    """A worker process, its pipes and the file of its output."""

    def __init__(self, rank: int, order: Mapping[str, Any], output: Path, env: Mapping[str, str]) -> None:
        self.rank, self.output = rank, output
        forks = forking.wanted() and not env and not order["accelerator"]
        self.popen = _begun(output, {**os.environ, "OMP_NUM_THREADS": "1", **env}, forks)
        self.requests, self.replies = cast(BinaryIO, self.popen.stdin), cast(BinaryIO, self.popen.stdout)
        self.incoming = b""
        self.answer: dict[str, Any] | None = None
        self.lost = False
        self.send({**order, "rank": rank})

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        self.answer = None
        with contextlib.suppress(BrokenPipeError):  # it died: `read` reports that
            self.requests.write(json.dumps(message).encode() + b"\n")

    def read(self) -> None:
        """Read what has come: the last whole line is the answer, and no data means that the process is lost."""
        data = os.read(self.replies.fileno(), 1 << 16)
        self.lost = not data
        *lines, self.incoming = (self.incoming + data).split(b"\n")
        if lines:
            self.answer = json.loads(lines[-1])

    def last_lines(self) -> str:
        """Return the end of the output."""
        return self.output.read_bytes()[-SHOWN_CHARACTERS:].decode(errors="replace").strip()

    def how_it_ended(self) -> str:
        """Return a sentence with the exit status or the signal, and the last lines."""
        code = self.popen.wait(10)
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return f"Worker {self.rank} {ending}. Its last lines:\n{self.last_lines()}"

    def kill(self) -> None:
        """Kill the process group and close the pipes."""
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has ended, or does not lead its group yet
            self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()
        self.requests.close()
        self.replies.close()


class Workers:
    """A group of worker processes.

    Args:
        world_size: ranks; with more than one ``torch.distributed`` is initialized on loopback.
        context: ``module:function`` or ``file.py:function``: a context manager of (rank, world_size) that each worker
            enters once.
        root: folder that ``file.py`` is relative to.
        process_group: backend of ``torch.distributed``.
        env: environment variables of the workers, in addition to this process's.
        deadline: seconds of one case.
        accelerator: device type; each rank takes the device of its number (``devices``). Empty: none is taken.
    """

    def __init__(
        self,
        world_size: int = 1,
        context: str = "",
        root: Path | None = None,
        process_group: str = "gloo",
        env: Mapping[str, str] | None = None,
        deadline: float = 120.0,
        accelerator: str = "",
    ) -> None:
        self.world_size, self.deadline, self.env = world_size, deadline, dict(env or {})
        self.order = {
            "world_size": world_size,
            "context": context,
            "root": str(root or Path.cwd()),
            "process_group": process_group,
            "deadline": deadline,
            "accelerator": accelerator,
            "path": [entry or "." for entry in sys.path],
        }
        self.ranks: list[_Rank] = []
        self.starts = 0
        self.losses = 0  # groups in which a rank died or did not answer
        self.cases = 0
        self.hopeless = ""  # why no more workers are started
        self.folder = Path()  # made with the first workers

    def run(self, bench: str, case: str, settings: Mapping[str, Any]) -> None:
        """Run one case on every rank.

        Raises:
            CaseFailed: it does not hold on some rank, or a rank was lost.
        """
        __tracebackhide__ = True
        if not self.ranks:
            self._start()
        self.cases += 1
        folder = self.folder / f"case{self.cases}"
        folder.mkdir()
        request = {"bench": bench, "case": case, "settings": dict(settings), "folder": str(folder)}
        for rank in self.ranks:
            rank.send({**request, "deadline": self.deadline})
        try:
            problem = self._wait(self.deadline)
        except BaseException:  # the test was interrupted: the answers have no reader
            self._end()
            raise
        failures = [(r.rank, r.answer["failed"]) for r in self.ranks if r.answer and r.answer.get("failed")]
        answered, lost = list(self.ranks), bool(problem)
        self.losses += lost
        if problem or 0 < len(failures) < self.world_size:  # the ranks may have exchanged different messages
            self._end()
        shutil.rmtree(folder, ignore_errors=True)
        if failures:
            problem = "\n\n".join(
                [failures[0][1], *(f"(rank {r}: {t.splitlines()[0]})" for r, t in failures[1:]), problem]
            ).strip()
            prefix = f"rank {failures[0][0]}: " if self.world_size > 1 else ""
            problem = prefix + problem
        if problem:
            raise CaseFailed(problem, lost or any(r.answer and r.answer.get("crashed") for r in answered))

    def close(self) -> None:
        """End the workers and remove their files."""
        self._end()
        if self.starts:
            shutil.rmtree(self.folder)
            self.starts = 0

    def _start(self) -> None:
        if not self.hopeless and self.losses >= MOST_LOSSES:
            self.hopeless = f"The workers were lost {self.losses} times; they are not started again."
        if self.hopeless:
            raise CaseFailed(self.hopeless)
        if not self.starts:
            self.folder = Path(tempfile.mkdtemp(prefix="engine-conformance-"))
        self.starts += 1
        cache = self.folder / f"cache{self.starts}"
        cache.mkdir()
        for rank in range(self.world_size):
            output = self.folder / f"output{self.starts}-{rank}"
            self.ranks.append(_Rank(rank, {**self.order, "cache": str(cache)}, output, self.env))
        try:
            problem = self._wait(START_SECONDS)
        except BaseException:
            self._end()
            raise
        refusals = [r.answer["refused"] for r in self.ranks if r.answer and "refused" in r.answer]
        if problem or refusals:
            self._end()
            self.hopeless = "The workers do not start. " + "\n".join([*refusals, problem])
            raise CaseFailed(self.hopeless)

    def _wait(self, seconds: float) -> str:
        """Wait until every rank has answered; return what went wrong with the processes, else an empty string."""
        end = time.monotonic() + seconds
        while waiting := [rank for rank in self.ranks if rank.answer is None and not rank.lost]:
            if any(
                r.lost or (r.answer and (r.answer.get("failed") or "refused" in r.answer)) for r in self.ranks
            ):
                end = min(end, time.monotonic() + STRAGGLER_SECONDS)
                seconds = min(seconds, STRAGGLER_SECONDS)
            if not _ready(waiting, end - time.monotonic()):
                break
        lost = [rank for rank in self.ranks if rank.lost]
        problems = [rank.how_it_ended() for rank in lost]
        if waiting and not lost:
            problems += _stacks(waiting)
        return "\n\n".join(problems)

    def _end(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self.ranks = []


def _begun(output: Path, env: Mapping[str, str], forks: bool) -> subprocess.Popen[bytes] | forking.Forked:
    """Start a worker that waits for its order. It leads a process group, so that its children are killed with it."""
    with output.open("wb") as stderr:
        if forks:
            return forking.fork(env, stderr.fileno())
        return subprocess.Popen(
            [sys.executable, "-m", "engine_plugin_testing.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            start_new_session=True,
            env=dict(env),
        )


def _ready(ranks: Sequence[_Rank], seconds: float) -> bool:
    """Read what has come; return whether anything came in time."""
    if seconds <= 0:
        return False
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.replies, selectors.EVENT_READ, rank.read)
        events = selector.select(seconds)
    for key, _ in events:
        key.data()
    return bool(events)


def _stacks(ranks: Sequence[_Rank]) -> list[str]:
    """Return the stacks of these ranks: on SIGUSR1 faulthandler writes them to their output."""
    for rank in ranks:
        rank.popen.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    return [f"Worker {rank.rank} does not answer. Its stacks:\n{rank.last_lines()}" for rank in ranks]
