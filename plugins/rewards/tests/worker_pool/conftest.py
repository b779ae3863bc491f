"""Runners of the rewards of ``bad_rewards.py``, and their samples."""

from pathlib import Path

import pytest

from engine_core.config.rewards import RewardConfig
from engine_core.plugins.plugin_set import PluginSet
from engine_core.rewards import RewardRunner
from engine_plugin_testing.text_rollouts import rollouts_of


@pytest.fixture
def rollouts():
    """Return ``rollouts("a", "bb", answer=["a", "b"])``: one rollout a text, in groups of two."""
    return rollouts_of


def runner_of(*rewards, live=(), **settings):
    """Start a runner of rewards of ``bad_rewards.py``, named or given as configs."""
    configs = [r if isinstance(r, RewardConfig) else RewardConfig(name=r, **settings) for r in rewards]
    plugins = PluginSet.load(
        {"rewards": [c.name for c in configs]}, ["bad_rewards.py"], Path(__file__).parent
    )
    return RewardRunner(configs, plugins, None, live)


@pytest.fixture
def runner():
    """Return ``runner("exact", weight=2.0)``: a runner of rewards of ``bad_rewards.py`` or of configs; closed at the
    end.
    """
    made = []

    def make(*rewards, **settings):
        made.append(runner_of(*rewards, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module", params=["misbehave", "misbehave_in_lists"])
def survivor(request):
    """Return a runner, shared by many tests, of the function that obeys the completion; and the reward's name."""
    one = runner_of(request.param, max_memory_gb=4, timeout_seconds=5)
    yield one, request.param
    one.close()
