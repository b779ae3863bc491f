"""A stage that resamples the rollouts of a step by their rewards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_core.types import Rollout


def pf_ppo_resample(
    rollouts: list[Rollout], step: int, *, method: str = "pow", power: float = 2.0, seed: int = 0
) -> tuple[list[Rollout], dict[str, float]]:
    """Resample the rollouts with replacement, in favor of rewards at the ends of the range, which are more reliable.

    Formula: probability of a rollout by `method`: `pow` ``|R|^power``; `max_min` only the highest and lowest R; `max_random` 0.4 for the highest R, 0.1 for others
    Paper: https://arxiv.org/abs/2409.06957
    Differs: drawn before the advantages (verl: after), so an estimator that looks at groups takes its statistics from what was drawn

    Args:
        rollouts: scored rollouts; one that is not valid is never drawn.
        step: step number; seeds the draw together with ``seed``.
        method: weight of a rollout with reward R: ``pow`` |R|^power, ``max_min`` 1 for the highest and
            the lowest R (else 0), ``max_random`` 0.4 for the highest R and 0.1 for others.
        power: exponent of ``pow``.
        seed: seed of the draw.

    Returns:
        As many rollouts as given, in the order of the batch, repeated ones next to each other; the metric ``distinct``,
        the share of valid rollouts that were drawn. If no weight is above 0, the rollouts are returned unchanged.
    """
    valid = [rollout for rollout in rollouts if rollout.valid]
    weights = _weights([rollout.reward for rollout in valid], method, power)
    if not sum(weights) > 0:
        return rollouts, {"distinct": 1.0}
    drawn = sorted(
        random.Random(f"{seed}:{step}").choices(range(len(valid)), weights=weights, k=len(rollouts))
    )
    return [valid[i] for i in drawn], {"distinct": len(set(drawn)) / len(valid)}


def _weights(rewards: Sequence[float], method: str, power: float) -> list[float]:
    if not rewards:
        return []
    high, low = max(rewards), min(rewards)
    if method == "pow":
        return [abs(reward) ** power for reward in rewards]
    if method == "max_min":
        return [float(reward in (high, low)) for reward in rewards]
    return [0.4 if reward == high else 0.1 for reward in rewards]
