from pathlib import Path

import pytest

from engine_core.config.rewards import RewardConfig
from engine_core.plugins.plugin_set import PluginSet
from engine_core.rewards import RewardRunner
from engine_plugin_testing.text_rollouts import rollout_of, rollouts_of


@pytest.fixture
def make_rollout():
    """``make_rollout("a", index, group, answer="x")``: one rollout; other names are columns."""
    return rollout_of


@pytest.fixture
def rollouts():
    """``rollouts("a", "bb", answer=["a", "b"])``: one rollout a text, groups of two."""
    return rollouts_of


@pytest.fixture
def runner():
    """``runner("exact", config("letters", weight=2.0))``: a runner, in this process, of rewards of ``named_rewards.py``."""

    def make(*rewards, tokenizer=None, live=(), given=None):
        configs = [r if isinstance(r, RewardConfig) else RewardConfig(name=r, workers=0) for r in rewards]
        names = {"rewards": [config.name for config in configs]}
        plugins = PluginSet.load(names, ["named_rewards.py"], Path(__file__).parent)
        return RewardRunner(configs, plugins, tokenizer, live, given=given)

    return make
