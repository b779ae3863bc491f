"""Pairs of worked solutions for learning from preferences: the right one, and one that slips in each step.

    python examples/word_problems/pairs.py FOLDER

writes ``FOLDER/data/pairs.jsonl`` and ``pairs_heldout.jsonl`` with the columns ``prompt``, ``chosen`` and
``rejected``. FOLDER is ``demo`` unless told otherwise.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from problems import draw

ROWS = {"pairs": 2000, "pairs_heldout": 200}


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Rows whose two solutions differ in every sum: both are drawn from one state of the generator."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        state = rng.getstate()
        wrong = draw(rng, slip=1.0)
        rng.setstate(state)
        right = draw(rng, slip=0.0)
        rows.append({"prompt": right.question + "\n", "chosen": right.solution, "rejected": wrong.solution})
    return rows


def make_pairs(folder: Path) -> None:
    """Both files below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate(ROWS.items(), 7):
        lines = [json.dumps(row) + "\n" for row in pairs(count, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    make_pairs(Path(sys.argv[1] if len(sys.argv) > 1 else "demo") / "data")
