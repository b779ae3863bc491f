"""The processes of one family of cases: started early, given an order when the GPUs are free, ended whatever they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

MEASURE = Path(__file__).parent / "measure.py"
ENVIRONMENT = {
    "megatron": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},  # messages go out in the order that its layers count on
}
LOOK_SECONDS = 0.1
END_SECONDS = 10.0  # for ranks to end by themselves once one has


class Crew:
    """``world`` ranks that have imported what ``family`` needs, or are about to.

    Args:
        folder: for their logs and notes.
    """

    number = 0

    def __init__(self, family, world, device, folder):
        Crew.number += 1
        self.family, self.world, self.folder = family, world, folder
        self.name = f"{family}-{Crew.number}"
        threads = max(1, (os.cpu_count() or 1) // (2 * world))
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "NCCL_NVLS_ENABLE": "0",  # multicast: many containers have no right to it, and NCCL then fails
            "TOKENIZERS_PARALLELISM": "false",
            **ENVIRONMENT.get(family, {}),
            **os.environ,
        }
        command = [sys.executable, str(MEASURE), "--family", family, "--device", device]
        self.ranks = []
        for rank in range(world):
            with open(folder / f"{self.name}.rank{rank}.log", "wb") as log:
                self.ranks.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
                )

    def run(self, cases, order, case_seconds, until, tell):
        """Have them measure cases until one fails, takes too long, or all are done.

        Args:
            case_seconds: most of one case.
            until: time (monotonic) at which they are ended.
            tell: called with each note.

        Returns:
            The case that did not end, and why; or None and "".
        """
        notes = self.folder / f"{self.name}.jsonl"
        notes.touch()
        order = {**order, "cases": cases, "notes": str(notes), "store": str(self.folder / self.name)}
        for rank, process in enumerate(self.ranks):
            process.stdin.write((json.dumps({**order, "rank": rank, "world": self.world}) + "\n").encode())
            process.stdin.close()
        running, begun, seen = cases[0]["name"], time.monotonic(), 0
        why, failed_at = {}, None
        while True:
            ended = [process.poll() for process in self.ranks]
            lines = notes.read_bytes().split(b"\n")[:-1]
            for note in map(json.loads, lines[seen:]):
                if "begun" in note:
                    running, begun = note["begun"], time.monotonic()
                if "failed" in note:
                    why[note["rank"]] = note["error"]
                tell(note)
            seen = len(lines)
            if all(code == 0 for code in ended):
                return None, ""
            if any(code for code in ended) or why:
                failed_at = failed_at or time.monotonic()
                if (
                    time.monotonic() - failed_at > 1.0 or None not in ended
                ):  # a moment for the errors of others
                    return running, _told(why) or f"a rank ended with status {next(c for c in ended if c)}"
            if time.monotonic() > until:
                return running, "the time was up"
            if time.monotonic() - begun > case_seconds:
                return running, f"not done after {case_seconds:.0f} s"
            time.sleep(LOOK_SECONDS)

    def end(self):
        """Nobody is left."""
        for process in self.ranks:
            if process.poll() is None:
                process.kill()
        for process in self.ranks:
            process.wait(END_SECONDS)


def _told(why):
    """Errors by rank: the first rank's own, and how many said so."""
    if not why:
        return ""
    rank = min(why)
    return f"rank {rank}: {why[rank]}" + (f" ({len(why)} ranks failed)" if len(why) > 1 else "")
