"""Stages that choose the rollouts of a step by their rewards: resampled, or without groups that teach nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine_core.errors import ConfigError, did_you_mean
from engine_core.metrics import Sum

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


def dynamic_sampling(
    rollouts: list[Rollout], step: int, *, reward: str | None = None
) -> tuple[list[Rollout], dict[str, float]]:
    """Drop groups without a learning signal, and sample others in their place.

    Formula: a group stays where two of its valid rollouts have different rewards
    Paper: https://arxiv.org/abs/2503.14476
    Differs: a further round samples only the prompts that are missing (DAPO: whole batches); `reward` looks at one reward alone

    Args:
        rollouts: scored rollouts, grouped by ``group_id``.
        step: not used.
        reward: compare only this reward, such as the correctness without a length penalty; a rollout to which it
            does not apply counts as not valid.

    Returns:
        The rollouts of the groups that are kept, in their order; metrics ``groups`` (all) and ``dropped_groups``.

    Raises:
        ConfigError: no rollout has a reward of that name.
    """
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.rewards)
    if reward is not None and rollouts and reward not in names:
        raise ConfigError(
            f"[stage.dynamic_sampling] reward: no reward '{reward}'.{did_you_mean(reward, names)}"
        )
    values: dict[int, set[float]] = {rollout.group_id: set() for rollout in rollouts}
    for rollout in rollouts:
        value = rollout.reward if reward is None else rollout.rewards.get(reward)
        if rollout.valid and value is not None:
            values[rollout.group_id].add(value)
    kept = [rollout for rollout in rollouts if len(values[rollout.group_id]) > 1]
    dropped = sum(len(seen) < 2 for seen in values.values())
    return kept, {"groups": Sum(len(values)), "dropped_groups": Sum(dropped)}
