"""The picture of ``docs/scaling.md``: step time, idle time and the controller's share over workers.

python benchmarks/simulator/plot.py benchmarks/simulator/results/growth.json docs/images/growth.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "sync": "#444444",
    "early-stop": "#d95f02",
    "early-stop-rounds": "#fdae61",
    "async-1": "#7570b3",
    "async-2": "#1b9e77",
    "async-4": "#1f78b4",
}


def series(
    results: list[dict[str, Any]], setting: str, mode: str, name: str
) -> tuple[list[int], list[float]]:
    """Workers and values."""
    found = sorted((r["workers"], r[name]) for r in results if (r["setting"], r["mode"]) == (setting, mode))
    return [workers for workers, _ in found], [value for _, value in found]


def panel(axes: Any, results: list[dict[str, Any]], name: str, title: str, percent: bool = False) -> None:
    """One value over workers, a line for each mode."""
    for mode, colour in COLOURS.items():
        workers, values = series(results, "growth", mode, name)
        axes.plot(
            workers, [value * (100 if percent else 1) for value in values], "o-", color=colour, label=mode
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([8, 16, 64, 256, 1024], ["8", "16", "64", "256", "1024"])
    axes.set_xlabel("workers")
    axes.set_title(title)
    axes.grid(alpha=0.3)


def main() -> None:
    """Draw what the file holds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("source", type=Path, help="what run.py wrote")
    parser.add_argument("target", type=Path, help="the picture, .png")
    given = parser.parse_args()
    results = json.loads(given.source.read_text())["results"]
    figure, places = plt.subplots(1, 3, figsize=(13, 4))
    panel(places[0], results, "step_s", "seconds a step")
    places[0].set_ylim(bottom=0)
    workers, values = series(results, "star", "async-4", "step_s")
    if workers:
        places[0].plot(
            workers, values, "x--", color=COLOURS["async-4"], label="async-4, weights from one rank"
        )
    places[0].legend(fontsize=8)
    panel(places[1], results, "idle", "idle devices, %", percent=True)
    places[1].set_ylim(0, 100)
    panel(places[2], results, "controller_share", "controller's CPU, % of the step", percent=True)
    places[2].set_yscale("log")
    for goal, text in ((1, "goal at 64"), (5, "goal at 1024")):
        places[2].axhline(goal, color="red", linewidth=0.8, linestyle=":")
        places[2].text(8, goal * 1.05, text, color="red", fontsize=7)
    figure.tight_layout()
    figure.savefig(given.target, dpi=90)


if __name__ == "__main__":
    main()
