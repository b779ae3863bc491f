"""Mean and spread of rewards: of a step, and of all values that a reward has given."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_core.types import Rollout


@dataclasses.dataclass
class RunningStd:
    """Standard deviation of all values seen (Welford, https://doi.org/10.2307/1266577)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def update(self, values: Sequence[float]) -> None:
        for value in values:
            self.count += 1
            delta = value - self.mean
            self.mean += delta / self.count
            self.squares += delta * (value - self.mean)

    @property
    def divisor(self) -> float:
        """The deviation (n), or 1 while there is none."""
        std = (self.squares / self.count) ** 0.5 if self.count else 0.0
        return std if std > 1e-8 else 1.0


def reward_statistics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """``reward/mean`` and ``/std`` over valid rollouts, ``/zero_variance_groups``."""
    rewards = [r.reward for r in rollouts if r.valid]
    groups: dict[int, set[float]] = {r.group_id: set() for r in rollouts}
    for rollout in rollouts:
        if rollout.valid:
            groups[rollout.group_id].add(rollout.reward)
    flat = sum(len(values) < 2 for values in groups.values())
    return {
        "reward/mean": statistics.fmean(rewards) if rewards else 0.0,
        "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
        "reward/zero_variance_groups": flat / len(groups) if groups else 0.0,
    }
