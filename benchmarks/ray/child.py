"""One run whose steps wait for a word: started by ``session.py``, the controller of a runtime.

Reads lines (``step``, ``calls N``) from its standard input, writes a line of JSON for each to the descriptor ``--tell``; the
end of its input ends the run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from engine_core import Trainer, load_config

SHOWN = ("reward/mean", "response_length/mean", "actor/grad_norm")  # that two runs of the same work share


class Ended(Exception):
    """Nobody asks for another step."""


class Paced(Trainer):
    """Does each step when it is told to."""

    tell: Any

    def step(self, step: int) -> dict[str, float]:
        self.tell({"ready": step})
        for line in iter(sys.stdin.readline, ""):
            word, *rest = line.split()
            if word == "step":
                begin = time.perf_counter()
                metrics = super().step(step)
                took = time.perf_counter() - begin
                self.tell({"seconds": took, "work": {name: metrics[name] for name in SHOWN}})
                return metrics
            self.tell({"call_seconds": self._call(int(rest[0]))})
        raise Ended

    def _call(self, count: int) -> float:
        """Median seconds of a command that does nothing."""
        took = []
        for _ in range(count):
            begin = time.perf_counter()
            self.groups["actor"].call("mark").result()
            took.append(time.perf_counter() - begin)
        return statistics.median(took)


def main() -> None:
    """Run until the input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--config", type=Path, required=True, help="JSON: keys of the run file and their values"
    )
    parser.add_argument("--tell", type=int, required=True, help="descriptor for answers")
    given = parser.parse_args()
    answers = os.fdopen(given.tell, "w")

    def tell(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    trainer = Paced(load_config(json.loads(given.config.read_text()), allow_code=True))
    trainer.tell = tell
    try:
        trainer.train()
    except Ended:
        pass
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
