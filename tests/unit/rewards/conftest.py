from pathlib import Path

import pytest
import torch

from engine_core.config.rewards import RewardConfig
from engine_core.plugins import PluginSet
from engine_core.rewards import RewardRunner
from engine_core.types import Prompt, Rollout


def _rollout(text, index=0, group=0, prompt="Q", **columns):
    tokens = torch.tensor([7, 8, *range(len(text))])
    return Rollout(
        request_id=f"1:{group}:{index}",
        prompt=Prompt(f"train:{index}", [7, 8], prompt, columns),
        token_ids=tokens,
        loss_mask=torch.arange(len(tokens)) >= 2,
        rollout_log_probs=torch.zeros(len(tokens)),
        policy_versions=torch.zeros(len(tokens), dtype=torch.int32),
        finish_reason="stop",
        group_id=group,
        index=index,
        text=text,
    )


@pytest.fixture
def make_rollout():
    """make_rollout("a", index, group, answer="x"): one rollout; other names are columns."""
    return _rollout


@pytest.fixture
def rollouts():
    """rollouts("a", "bb", answer=["a", "b"]): one rollout a text, groups of two."""

    def make(*texts, **columns):
        return [
            _rollout(text, i, i // 2, **{name: values[i] for name, values in columns.items()})
            for i, text in enumerate(texts)
        ]

    return make


def _runner(*rewards, live=(), tokenizer=None, given=None, **settings):
    configs = [r if isinstance(r, RewardConfig) else RewardConfig(name=r, **settings) for r in rewards]
    plugins = PluginSet.load(
        {"rewards": [c.name for c in configs]}, ["bad_rewards.py"], Path(__file__).parent
    )
    return RewardRunner(configs, plugins, tokenizer, live, given=given)


@pytest.fixture
def runner():
    """runner("exact", weight=2.0): a runner of rewards of ``bad_rewards.py`` or given as configs; closed at the end."""
    made = []

    def make(*rewards, **settings):
        made.append(_runner(*rewards, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module", params=["misbehave", "misbehave_in_lists"])
def survivor(request):
    """A runner of the function that does what the completion says, used by many tests; and its name."""
    one = _runner(request.param, max_memory_gb=4, timeout_seconds=5)
    yield one, request.param
    one.close()
