"""A one-file plugin: a stage that shuffles the rewards of a step.

The rewards keep their mean and spread but say nothing about the answers, so a run with this stage must not improve.
If it does, the model learns from something other than the reward.
"""

import random

from engine_core import hookimpl
from engine_core.specs import Stage


def shuffle(rollouts, step):
    """Permute the rewards of the step over all its rollouts, by a seed of the step."""
    rewards = [rollout.reward for rollout in rollouts]
    random.Random(step).shuffle(rewards)
    for rollout, reward in zip(rollouts, rewards, strict=True):
        rollout.reward = reward
    return rollouts, {}


@hookimpl
def engine_stages():
    return {"shuffled_rewards": Stage(load=shuffle)}
