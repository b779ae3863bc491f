"""Trainers and environments of this repository keep the contracts of the kit."""

import pytest

from engine_plugin_testing import EnvironmentSuite, TrainerSuite

SAMPLING = {"rollout.group_size": 4, "rollout.max_response_tokens": 8}


class TestRL(TrainerSuite):
    name = "rl"
    keys = SAMPLING
    unsupported = {"test_unknown_options_are_refused": "it has no table"}


class TestAllSections(TrainerSuite):
    """A trainer whose spec names no sections reads all of them, so the suite gives it the reward for digits."""

    name = "whitened"
    plugins = ["whitened.py"]
    keys = SAMPLING


class TestSFT(TrainerSuite):
    name = "sft"


@pytest.mark.slow
class TestAsync(TrainerSuite):
    name = "async"
    options = {"max_staleness": 0}
    keys = SAMPLING


class TestGuess(EnvironmentSuite):
    name = "guess"
    plugins = ["guess.py"]


@pytest.mark.slow
class TestAgain(EnvironmentSuite):
    name = "again"
    plugins = ["guess.py"]
    chat = True
