"""One short run of each main algorithm learns on the default path, and none does where the reward tells nothing.

The task: answer in digits. A random model does so with 3% of its characters.
"""

import statistics

import pytest
from variants import variants

from engine_core import Trainer, load_config

ALGORITHMS = {
    "grpo": {},
    "rloo": {"algorithm.advantage": "rloo"},
    "cispo": {"algorithm.loss": "cispo"},
    "gspo": {"algorithm.loss": "gspo"},
    "dapo": {
        "stage": [{"name": "dynamic_sampling", "dynamic_sampling": {"max_rounds": 2}}],
        "algorithm.ppo_clip.clip_ratio_high": 0.28,
    },
    "ppo": {"algorithm.advantage": "gae", "critic.optim.lr": 5e-3, "critic.warmup_steps": 2},
}
SHORT = {
    "run.steps": 16,
    "data.prompts_per_step": 8,
    "algorithm.mini_batch_prompts": 4,  # the second update of a step is off policy
    "rollout.group_size": 8,
    "rollout.max_response_tokens": 4,
    "actor.optim.lr": 1e-2,
    "tracking.rollouts_every_steps": 0,
    "checkpoint.at_end": False,
}


class Digits:
    """Share of digits in a response; ``shuffled``: told to the next response to the same prompt."""

    __name__ = "digits"

    def __init__(self, shuffled):
        self.shuffled, self.means = shuffled, []

    def __call__(self, completions, group_ids):
        shares = [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
        self.means.append(statistics.fmean(shares))
        if not self.shuffled:
            return shares
        groups = {}
        for position, group in enumerate(group_ids):
            groups.setdefault(group, []).append(position)
        told = list(shares)
        for members in groups.values():
            for position, other in zip(members, members[1:] + members[:1], strict=True):
                told[position] = shares[other]
        return told


@pytest.mark.parametrize("name", variants(ALGORITHMS, ("grpo", "ppo")))
def test_the_reward_rises_and_a_shuffled_one_does_not(grpo, name):
    ends = {}
    for shuffled in (False, True):
        digits = Digits(shuffled)
        settings = grpo | SHORT | ALGORITHMS[name] | {"run.name": f"{name}-{shuffled}"}
        run = Trainer(load_config(overrides=settings), rewards=[digits])
        run.train()
        run.close()
        assert digits.means[0] < 0.1
        ends[shuffled] = statistics.fmean(digits.means[-3:])
    assert ends[False] > 0.5
    assert ends[True] < 0.1
