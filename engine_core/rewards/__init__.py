"""Execution of rewards: functions come from plugins, and this package protects the run from their failures.

A reward is a function that receives the arguments it names::

    def exact(completions, answer):  # lists, one value per sample
        return [float(c == a) for c, a in zip(completions, answer)]


    def exact(completion, answer):  # one sample per call
        return float(completion == answer)


    def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...  # verl's
    def reward(prompts, completions, completion_ids, **columns): ...  # TRL's

It returns a number for each sample, None if it does not apply. It may be ``async``. ``signatures`` describes the
names of arguments, the forms of a function and the values it may return.

Unless ``workers = 0``, a reward runs in separate processes (``pool``, ``worker``). They are killed and
replaced when a sample takes too long, even if it never releases the interpreter, and they may
crash, print, exit or fork. The ``[[reward]]`` table says how a failed sample is handled (``runner``).

A reward may also come from a model of the run (``models``; the part ``reward_models`` builds it).

Left out on purpose: isolation against hostile code. A worker protects from accidents, not from attacks. A reward that
executes code written by a model needs its own sandbox.
"""

from engine_core.rewards.models import ModelReward
from engine_core.rewards.runner import RewardRunner

__all__ = ["ModelReward", "RewardRunner"]
