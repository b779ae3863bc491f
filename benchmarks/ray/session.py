"""A run of ``child.py`` as its parent holds it: steps one by one, and the CPU seconds of every process of it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

MARK = "BENCHMARK_RAY_RUN"  # variable that all processes of a run share
TICKS = os.sysconf("SC_CLK_TCK")
KINDS = ("controller", "workers", "raylet", "gcs_server", "others")
END_SECONDS = 30.0  # for a run to end by itself
LATE_SECONDS = 5.0  # the same where the time is up
CLEAR_SECONDS = 10.0
LAST_CHARACTERS = 1500


class Failed(RuntimeError):
    """A run did not do what it was asked, or not in time."""


class Session:
    """A run that is alive.

    Args:
        folder: for its files.
        name: of the run.
        config: keys of its run file and their values.
        deadline: on the clock of ``time.monotonic``; nothing is waited for longer.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], deadline: float) -> None:
        self.name, self.deadline, self.mark = name, deadline, f"{os.getpid()}-{name}"
        file, self.log = folder / f"{name}.json", folder / f"{name}.log"
        file.write_text(json.dumps({**config, "run.name": name}))
        reading, writing = os.pipe()
        command = [sys.executable, str(Path(__file__).with_name("child.py")), "--config", str(file)]
        began = time.perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--tell", str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=[writing],
                env={**os.environ, MARK: self.mark},
                start_new_session=True,
            )
        os.close(writing)
        self._told: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(os.fdopen(reading),), daemon=True).start()
        try:
            self._next("ready")
        except Failed:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - began

    def calls(self, count: int) -> float:
        """Median seconds of a command that does nothing."""
        return float(self._ask(f"calls {count}", "call_seconds")["call_seconds"])

    def step(self) -> dict[str, Any]:
        """One step: its ``seconds``, ``work`` (numbers that say whether two runs do the same) and ``cpu`` by kind."""
        before = self._cpu()
        found = self._ask("step", "seconds")
        after = self._cpu()
        cpu = dict.fromkeys(KINDS, 0.0)
        for pid, (kind, spent) in after.items():
            cpu[kind] += spent - (before[pid][1] if pid in before else 0.0)
        self._next("ready")
        return {**found, "cpu": cpu}

    def close(self) -> None:
        """End it, by force where it does not end by itself."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(END_SECONDS if time.monotonic() < self.deadline else LATE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        deadline = time.monotonic() + CLEAR_SECONDS
        while (left := self._cpu()) and time.monotonic() < deadline:  # a keeper clears up after a cluster
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _ask(self, line: str, key: str) -> dict[str, Any]:
        try:
            self.process.stdin.write(line + "\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]
        except OSError:
            raise Failed(f"{self.name} ended: {self._last()}") from None
        return self._next(key)

    def _next(self, key: str) -> dict[str, Any]:
        try:
            found = self._told.get(timeout=max(self.deadline - time.monotonic(), 0.01))
        except queue.Empty:
            raise Failed(f"the time was up in {self.name}: {self._last()}") from None
        if found is None or key not in found:
            raise Failed(f"{self.name} gave {found} where '{key}' was expected: {self._last()}")
        return found

    def _read(self, answers: IO[str]) -> None:
        with answers:
            for line in answers:
                self._told.put(json.loads(line))
        self._told.put(None)

    def _last(self) -> str:
        return self.log.read_text(errors="replace")[-LAST_CHARACTERS:]

    def _cpu(self) -> dict[int, tuple[str, float]]:
        """Kind and CPU seconds of each process of the run, by its id."""
        wanted, found = f"{MARK}={self.mark}".encode(), {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            folder = Path("/proc", entry)
            try:
                if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                    continue
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            kind = "controller" if int(entry) == self.process.pid else kind_of(words)
            found[int(entry)] = kind, (int(fields[11]) + int(fields[12])) / TICKS
        return found


def kind_of(command: str) -> str:
    """What a process of a run is, by its command line."""
    if command.startswith("ray::Seat") or "engine_plugin_processes.worker" in command:
        return "workers"
    program = command.split(" ", 1)[0].rpartition("/")[2]
    return program if program in KINDS else "others"
