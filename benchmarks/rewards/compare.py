"""Programs a second that the reward `code` runs, in each tier of the sandbox and without one.

    python benchmarks/rewards/compare.py --programs 400 --workers 2

Without a sandbox a program is started as ``python -I -S -c`` by ``subprocess``. With one, it is given to a
box that is already started. Rates are of the wall clock; "CPU" is what one program costs the processor in all
its processes, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from engine_plugin_rewards.sandbox.box import Box, BoxProblem
from engine_plugin_rewards.sandbox.tiers import TIERS

PROGRAM = "n = int(input())\nprint(sum(i * i for i in range(n)))"
WHAT = {"kind": "stdin", "source": PROGRAM}
STDIN, EXPECTED = b"50\n", b"40425\n"


def plain() -> bytes:
    """Without a box and without limits."""
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    return subprocess.run(command, input=STDIN, capture_output=True, check=True).stdout


def measured(run: Callable[[], bytes], programs: int) -> list[float]:
    """Seconds of each of some runs by one worker."""
    seconds = []
    for _ in range(programs):
        start = time.perf_counter()
        assert run() == EXPECTED
        seconds.append(time.perf_counter() - start)
    return seconds


def cpu(boxes: Sequence[Box]) -> float:
    """Seconds that this process, what it waited for, and all processes of some boxes have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(usage.ru_utime + usage.ru_stime for usage in used)
    for box in boxes:
        first = psutil.Process(box.popen.pid)
        total += sum(sum(process.cpu_times()[:4]) for process in (first, *first.children(recursive=True)))
    return total


def row(name: str, runs: Sequence[Callable[[], bytes]], programs: int, boxes: Sequence[Box] = ()) -> None:
    """Measure and print one line."""
    before, start = cpu(boxes), time.perf_counter()
    with ThreadPoolExecutor(len(runs)) as pool:
        found = list(pool.map(lambda run: measured(run, programs // len(runs)), runs))
    wall = time.perf_counter() - start
    seconds = [second for worker in found for second in worker]
    print(
        f"| {name} | {len(seconds) / wall:.0f} | {60 * len(seconds) / wall:,.0f} | "
        f"{1000 * statistics.median(seconds):.1f} | {1000 * (cpu(boxes) - before) / len(seconds):.1f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=int, default=400, help="programs for each line")
    parser.add_argument("--workers", type=int, default=2, help="boxes at the same time")
    arguments = parser.parse_args()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"{arguments.programs} programs, {arguments.workers} workers, {os.cpu_count()} cores, load {load}\n"
    )
    print("| | programs/s | programs/min | median ms | CPU ms |\n|---|---|---|---|---|")
    row("no sandbox, `python -I -S -c`", [plain] * arguments.workers, arguments.programs)
    for tier in TIERS:
        try:
            boxes = [Box(tier) for _ in range(arguments.workers)]
        except BoxProblem as exc:
            print(f"| {tier} | not on this machine: {exc} | | | |")
            continue
        runs: list[Callable[[], bytes]] = [lambda box=box: box.run(WHAT, STDIN).output for box in boxes]
        for run in runs:
            run()
        row(tier, runs, arguments.programs, boxes)
        for box in boxes:
            box.close()


if __name__ == "__main__":
    main()
