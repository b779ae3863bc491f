"""The learning curves of a run as one picture, for the card of a model and the demo."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = {
    "eval/accuracy": "Held-out accuracy",
    "reward/mean": "Reward",
    "actor/loss": "Loss",
    "response_length/mean": "Response length, tokens",
    "actor/entropy": "Entropy, nats per token",
    "mismatch/mean_abs": "Mismatch of log-probs",
}


def draw_curves(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the curves that a run has: each metric as a faint line and its running mean, evaluations as dots.

    Args:
        metrics: the lines of ``metrics.jsonl``.
    """
    from matplotlib.figure import Figure

    lines = {name: [line for line in metrics if line.get(name) is not None] for name in SHOWN}
    present = [name for name in SHOWN if lines[name]]
    rows = -(-len(present) // 3) or 1
    figure = Figure(figsize=(4.3 * min(3, len(present) or 1), 2.9 * rows), layout="constrained")
    for place, name in enumerate(present, 1):
        axes = figure.add_subplot(rows, min(3, len(present)), place)
        steps, values = zip(*((line["step"], line[name]) for line in lines[name]), strict=True)
        few, half = name.startswith("eval/") or len(steps) < 3, max(1, len(steps) // 40)
        means = [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
        axes.plot(steps, values, "o-" if few else "-", color="C0", alpha=1 if few else 0.25)
        if not few:
            axes.plot(steps, means, color="C0")
        axes.set_title(SHOWN[name], fontsize=10)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    return figure
