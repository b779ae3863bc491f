"""Draw the figures of the pages into docs/images: ``python docs/figures.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

IMAGES = Path(__file__).parent / "images"
SAMPLE, CARRIED, TRAIN = "#4878a8", "#a8c4e0", "#d98032"
LENGTHS = [
    [3, 5, 4, 10, 6],
    [4, 6, 3, 5, 9],
    [5, 3, 8, 4, 6],
]  # seconds of the responses of three steps, by sampler
TRAINING = 5


def correction() -> None:
    """Draw the weight of a token's loss over its ratio, for three settings."""
    ratio = np.linspace(0.01, 6.5, 1300)
    inside = (ratio >= 0.5) & (ratio <= 5)
    figure, axes = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    axes.plot(ratio, np.minimum(ratio, 2), color=SAMPLE, lw=2.2, label='level = "token" (TIS), cap 2')
    axes.plot(ratio, np.where(inside, ratio, 0), color=TRAIN, lw=1.6, label='with mask = "token" (IcePop)')
    axes.axhline(1, color="gray", lw=1.2, ls="--", label='level = "off"')
    axes.set(
        xlabel="ratio s = p_old / p_rollout of a token",
        ylabel="weight of its loss",
        xlim=(0, 6.5),
        ylim=(-0.1, 5.4),
    )
    axes.legend(frameon=False, loc="upper left")
    _save(figure, "correction")


def steps() -> None:
    """Draw who works when in three steps of rl, of over_sampling and of async."""
    figure, rows = plt.subplots(3, 1, figsize=(7.2, 5.6), sharex=True, layout="constrained")
    for axes, draw, title in zip(rows, (_rl, _early, _async), TITLES, strict=True):
        end = draw(axes)
        axes.axvline(end, color="black", lw=1)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks([*range(5), 5.3], [*(f"response {n}" for n in range(1, 6)), "update"], fontsize=7)
        axes.invert_yaxis()
    rows[-1].set_xlabel("time; a line marks the end of step 3")
    rows[0].set_xlim(0, 46)
    _save(figure, "steps")


TITLES = (
    'trainer = "rl": sampler and trainer wait for each other',
    "rollout.over_sampling: the longest responses continue in the next step (light)",
    'trainer = "async": the sampler works while the policy is updated',
)


def _bar(axes, row, start, length, color) -> None:
    axes.barh(row, length, left=start, height=0.7, color=color, edgecolor="white")


def _rl(axes) -> float:
    now = 0.0
    for lengths in LENGTHS:
        for row, length in enumerate(lengths):
            _bar(axes, row, now, length, SAMPLE)
        now += max(lengths)
        _bar(axes, 5.3, now, TRAINING, TRAIN)
        now += TRAINING
    return now


def _early(axes) -> float:
    now, left = 0.0, [0.0] * 5
    for lengths in LENGTHS:
        whole = [rest or length for rest, length in zip(left, lengths, strict=True)]
        cut = sorted(whole)[3]  # the step has enough when four of five are complete
        for row, length in enumerate(whole):
            _bar(axes, row, now, min(length, cut), CARRIED if left[row] else SAMPLE)
        left = [max(length - cut, 0.0) for length in whole]
        now += cut
        _bar(axes, 5.3, now, TRAINING, TRAIN)
        now += TRAINING
    return now


def _async(axes) -> float:
    free, trained = [0.0] * 5, 0.0
    for lengths in [*LENGTHS, LENGTHS[0]]:
        for row, length in enumerate(lengths):
            _bar(axes, row, free[row], length, SAMPLE)
            free[row] += length
        if lengths is not LENGTHS[0] or trained == 0:
            start = max(trained, *free)
            _bar(axes, 5.3, start, TRAINING, TRAIN)
            trained = start + TRAINING
    return trained


def _save(figure, name: str) -> None:
    figure.savefig(IMAGES / f"{name}.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    correction()
    steps()
