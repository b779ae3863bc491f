"""What a run goes on from: everything between two steps that no worker holds.

A point is taken when a step is trained and again when it is done. Whatever interrupts the next step, the
workers' weights are still those of the last point, so that a checkpoint of it can be written at any time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from engine_core.train.run import TrainingRun


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The controller's state after a step.

    ``unfinished`` holds the metrics of a step that is trained, but not evaluated and written down yet.
    """

    step: int
    data: dict[str, Any]  # position of the data source
    trainer: dict[str, Any]  # the trainer's own: rewards' statistics, adaptive coefficients
    random: tuple[Any, Any]  # states of Python's and numpy's global generators
    metrics: dict[str, float]  # of the step, for the choice of the best checkpoint
    unfinished: dict[str, float] | None = None
    files: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)  # state that is no JSON

    @classmethod
    def take(
        cls, run: TrainingRun, metrics: Mapping[str, float], unfinished: Mapping[str, float] | None = None
    ) -> ResumePoint:
        """The point where ``run`` stands now; its trained workers note their random states."""
        for name, role in run.roles(training=True).items():
            if role.kind == "train" and role.trainable and name in run.groups:  # not all outside of training
                run.groups[name].call("mark").result()
        return cls(
            run.step_done,
            run.source.state(),
            {"skipped_in_a_row": dict(run.skipped_in_a_row), **run.state()},
            (random.getstate(), numpy.random.get_state()),
            _plain(metrics),
            None if unfinished is None else _plain(unfinished),
            run.files(),
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values, for ``state.json``."""
        python, (name, keys, *rest) = self.random
        return {
            "data": self.data,
            "trainer": self.trainer,
            "random": {"python": python, "numpy": [name, keys.tolist(), *rest]},
            "metrics": self.metrics,
            "unfinished": self.unfinished,
        }


def seed_random(seed: int) -> None:
    """Seed Python's and numpy's global generators, which rewards and stages of a user may draw from."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set Python's and numpy's global generators to what ``ResumePoint.as_json`` wrote."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def _plain(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value if isinstance(value, int | float) else float(value) for name, value in metrics.items()
    }
