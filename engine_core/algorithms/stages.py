"""The stage of the core, which chooses the scored rollouts for the update: ``f(rollouts, step, **options)``.

A stage returns whole rollouts, so tokens, masks and rewards stay together when it drops or repeats some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from engine_core.types import Rollout


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
    return kept, {"groups": float(len(values)), "dropped_groups": float(dropped)}
