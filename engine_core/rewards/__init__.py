"""Running rewards: functions come from plugins, this package keeps them from hurting a run.

A reward is a function that receives the arguments it names::

    def exact(completions, answer):  # lists, one value a sample
        return [float(c == a) for c, a in zip(completions, answer)]


    def exact(completion, answer):  # one sample a call
        return float(completion == answer)


    def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...  # verl's
    def reward(prompts, completions, completion_ids, **columns): ...  # TRL's

It returns a number for each sample; None where it does not apply. It may be ``async``. Which names
there are, which form a function has and what it may return: ``signatures``.

Unless ``workers = 0`` it runs in processes of its own (``pool``, ``worker``) that are killed and
replaced when a sample takes too long, also when it never gives the interpreter back, and that may
crash, print, exit or fork. What a failed sample means is declared in its ``[[reward]]`` (``runner``).

A reward may also come from a model of the run (``models``; the part ``reward_models`` builds it).

Left out on purpose: isolation against hostile code. A worker keeps accidents away, not attacks; a reward that
runs what a model wrote brings its own sandbox.
"""

from engine_core.rewards.models import ModelReward
from engine_core.rewards.runner import RewardRunner

__all__ = ["ModelReward", "RewardRunner"]
