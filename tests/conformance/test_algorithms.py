"""The core's estimators, losses and stages keep the contracts of the kit."""

from __future__ import annotations

import math

import pytest

from engine_plugin_testing import AdvantageSuite, LossSuite, StageSuite

HALF = math.sqrt(0.5)


class TestGRPO(AdvantageSuite):
    name = "grpo"
    options = {"epsilon": 1e-9}
    examples = [([[0.0, 1.0], [1.0, 1.0]], [[-HALF, HALF], [0.0, 0.0]])]


class TestDrGRPO(AdvantageSuite):
    name = "dr_grpo"
    examples = [([[0.0, 1.0], [1.0, 1.0], [4.0, 0.0, 2.0]], [[-0.5, 0.5], [0.0, 0.0], [2.0, -2.0, 0.0]])]


class TestRLOO(AdvantageSuite):
    name = "rloo"
    examples = [([[0.0, 1.0], [4.0, 0.0, 2.0]], [[-1.0, 1.0], [3.0, -3.0, 0.0]])]


ELSEWHERE = {"test_values_are_right": "tests/unit/algorithms has the values"}
ESTIMATORS = (
    "batch_mean",
    "gpg",
    "grpo_passk",
    "opo",
    "reinforce",
    "reinforce_plus_plus",
    "remax",
    "gae",
    "gdpo",
)
LOSSES = ("cispo", "dppo_kl", "dppo_tv", "dro", "gmpo", "gspo", "luspo", "sapo", "vespo")
for _suite, _names in ((AdvantageSuite, ESTIMATORS), (LossSuite, LOSSES)):
    for _name in _names:
        _made = type(
            f"Test_{_name}", (_suite,), {"name": _name, "unsupported": ELSEWHERE, "__module__": __name__}
        )
        globals()[_made.__name__] = pytest.mark.slow(_made)


class TestPPOClip(LossSuite):
    name = "ppo_clip"
    options = {"clip_ratio": 0.2}
    examples = [
        ((-1.0, -1.0, 2.0), -2.0),
        ((math.log(0.3), math.log(0.2), 1.0), -1.2),  # a ratio of 1.5, clipped
        ((math.log(0.3), math.log(0.2), -1.0), 1.5),
    ]


class TestGSPO(LossSuite):
    """The ratio of a response: exp of the mean log-ratio of its three tokens."""

    name = "gspo"
    options = {"clip_ratio_low": 0.9, "clip_ratio_high": 0.5}
    examples = [
        (([-1.0, -1.0, -2.0], -1.0, 2.0), [-2 * math.exp(-1 / 3)] * 3),
        (([-1.0, -0.5, -0.2], [-2.0, -1.5, -0.2], -1.0), [math.exp(2 / 3)] * 3),
        ((-0.5, -1.0, [1.0, 0.0, 2.0]), [-1.5, 0.0, -3.0]),  # clipped: exp(0.5) is above 1.5
    ]


class TestReinforce(LossSuite):
    name = "reinforce"
    examples = [((-1.5, -1.0, 2.0), 3.0)]


class TestDynamicSampling(StageSuite):
    name = "dynamic_sampling"
    examples = [([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], [[0, 1], [], []])]


class TestReplayCache(StageSuite):
    name = "replay_cache"
    examples = [([[0.0, 1.0], [1.0, 1.0]], [[0, 1], [0, 1]])]
