"""Processes on devices: each job a process of its own, each device one job at a time.

A job that fails, or that was not begun when the time was up, takes nothing with it but the jobs that need what it writes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FRAMEWORKS = ("trl", "engine")
NOT_THEIR_OWN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|VLLM_(PORT|DP_\w+)|(PET|TORCHELASTIC|SLURM|OMPI|PMI)_\w+"
)
"""Variables of whoever started the comparison, by which processes side by side would take one port, or each other for ranks of one run."""
CPU = "cpu"  # the place of jobs beside the devices
TOLD = 2500  # characters of the end of a failed process's output


@dataclass(frozen=True)
class Job:
    """One call of ``trl_run.py`` or ``engine_run.py``.

    ``Job("best-effort trl gates", "trl", "gates", "gpu", {"lane": "best-effort", "steps": 2})``
    """

    name: str  # no other job's
    framework: str  # of FRAMEWORKS
    what: str  # ``time``, ``gates`` or ``learn``
    workload: str
    options: Mapping[str, Any]
    after: tuple[str, ...] = ()  # jobs that must have succeeded before
    on_cpu: bool = False  # beside the devices, one at a time


@dataclass
class Found:
    """What came of jobs, by name."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # why there is no result
    seconds: dict[str, float] = field(default_factory=dict)  # of the process


@dataclass(frozen=True)
class Command:
    """How a framework's script is called."""

    words: Sequence[str]  # Python, script, and what all jobs are told
    environment: Mapping[str, str]


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that is a run of its own: it chooses ports that are free."""
    return {name: value for name, value in environment.items() if not NOT_THEIR_OWN.fullmatch(name)}


class Pool:
    """Runs jobs in their order, on as many devices at the same time as there are.

    Args:
        commands: by framework.
        devices: numbers for ``CUDA_VISIBLE_DEVICES``, one process at a time on each; "" leaves that variable alone.
        folder: for what the processes write. A job whose result lies there is not run again.
        budget: seconds; then nothing is begun any more, and what runs is ended.
        on_end: called when a job has ended, from the thread of its device, one at a time.
    """

    def __init__(
        self,
        commands: Mapping[str, Command],
        devices: Sequence[str],
        folder: Path,
        budget: float,
        on_end: Callable[[Found], None] = lambda found: None,
    ) -> None:
        self.commands, self.devices, self.folder, self.on_end = commands, devices, folder, on_end
        self.found = Found()
        self._ends_at = time.monotonic() + budget
        self._changed = threading.Condition()
        self._left: list[Job] = []
        self._running: dict[str, subprocess.Popen[bytes]] = {}  # by device

    def run(self, jobs: Sequence[Job]) -> Found:
        """To the end of all, or of the budget. Interrupted, it ends what it began."""
        self._left = [job for job in jobs if not self._kept(job)]
        places = [*self.devices, *([CPU] if any(job.on_cpu for job in self._left) else [])]
        threads = [threading.Thread(target=self._work, args=(place,)) for place in places]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self._ends_at = 0.0
            for process in list(self._running.values()):
                _end(process)
            raise
        return self.found

    def _kept(self, job: Job) -> bool:
        """Whether there is a result of an earlier call; it is taken then."""
        out = self._stem(job).with_suffix(".json")
        if not out.exists():
            return False
        self.found.results[job.name] = json.loads(out.read_text())
        print(f"  {job.name:32} kept", flush=True)
        return True

    def _stem(self, job: Job) -> Path:
        return self.folder / job.name.replace(" ", "_")

    def _work(self, device: str) -> None:
        while (job := self._next(device == CPU)) is not None:
            started = time.monotonic()
            result, failure = self._call(job, device)
            with self._changed:
                self.found.seconds[job.name] = time.monotonic() - started
                if result is None:
                    self._fail(job, failure)
                else:
                    self.found.results[job.name] = result
                state = "ended" if result is not None else "FAILED"
                print(f"  {job.name:32} {state} {self.found.seconds[job.name]:6.1f} s", flush=True)
                self.on_end(self.found)
                self._changed.notify_all()

    def _next(self, on_cpu: bool) -> Job | None:
        """The first job for this place whose needs are there; None where no more will be. Waits while others may still end."""
        with self._changed:
            while any(job.on_cpu == on_cpu for job in self._left):
                if time.monotonic() >= self._ends_at:
                    for job in self._left:
                        self._fail(job, "not begun: the time was up")
                    self._left = []
                    break
                self._drop_hopeless()
                ready = (
                    job
                    for job in self._left
                    if job.on_cpu == on_cpu and all(n in self.found.results for n in job.after)
                )
                if (job := next(ready, None)) is not None:
                    self._left.remove(job)
                    return job
                self._changed.wait(timeout=1.0)
        return None

    def _drop_hopeless(self) -> None:
        for job in list(self._left):
            if missing := [name for name in job.after if name in self.found.failures]:
                self._left.remove(job)
                self._fail(job, f"not begun: it needs '{missing[0]}', which failed")

    def _fail(self, job: Job, why: str) -> None:
        self.found.failures[job.name] = why
        print(f"  {job.name}: {why}", flush=True)

    def _call(self, job: Job, device: str) -> tuple[dict[str, Any] | None, str]:
        """What the script wrote, or None and why."""
        stem = self._stem(job)
        out, log = stem.with_suffix(".json"), stem.with_suffix(".log")
        command = self.commands[job.framework]
        words = [
            *command.words[:2],
            job.what,
            *command.words[2:],
            "--workload",
            job.workload,
            "--out",
            str(out),
        ]
        for name, value in job.options.items():
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        pinned = {"CUDA_VISIBLE_DEVICES": "" if device == CPU else device} if device else {}
        with log.open("w") as file:
            process = subprocess.Popen(
                words, env={**alone(command.environment), **pinned}, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,  # its children end with it
            )  # fmt: skip
            self._running[device] = process
            try:
                code = process.wait(timeout=max(self._ends_at - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                _end(process)
                return None, f"ended: the time was up\n{log.read_text(errors='replace')[-TOLD:]}"
            finally:
                del self._running[device]
        if code or not out.exists():
            return None, f"exit {code}: {' '.join(words)}\n{log.read_text(errors='replace')[-TOLD:]}"
        result: dict[str, Any] = json.loads(out.read_text())
        return result, ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """A process and its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
