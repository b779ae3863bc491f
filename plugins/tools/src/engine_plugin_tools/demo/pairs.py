"""Pairs of worked solutions for DPO: the right one, and one that is wrong in every operation."""

from __future__ import annotations

import json
import random
from pathlib import Path

from engine_plugin_tools.demo.problems import draw

ROWS = {"pairs": 2000, "pairs_heldout": 200}


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Return rows whose solutions differ in every sum: both are drawn from one state of the generator."""
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
    """Write ``pairs.jsonl`` and ``pairs_heldout.jsonl`` with the columns ``prompt``, ``chosen``, ``rejected``."""
    for seed, (name, count) in enumerate(ROWS.items(), 7):
        lines = [json.dumps(row) + "\n" for row in pairs(count, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
