"""Environments of other libraries in whole short GRPO runs of a random model, with their own tasks as data."""

import json

import pytest

from engine_core.runs.rollout_files import read_rollouts

DIGITS = '''
"""A text environment of Gymnasium: each action earns the share of its characters that are digits, twice."""

import gymnasium
from gymnasium.spaces import Text


class Digits(gymnasium.Env):
    observation_space, action_space = Text(1000), Text(1000)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 2
        return f"Digits like {int(self.np_random.integers(100))}? ", {}

    def step(self, action):
        self.left -= 1
        reward = sum(map(str.isdigit, action)) / max(len(action), 1)
        return " More? ", reward, self.left == 0, False, {}


gymnasium.register("Digits-v0", Digits, disable_env_checker=True)
'''


@pytest.fixture
def learn(grpo, trained):
    """learn(settings): the metrics of each step, and the rollouts of the last."""

    def run(settings):
        common = {"reward": [], "actor.optim.lr": 2e-2, "run.steps": 20, "rollout.group_size": 16}
        drop = ("data.train", "data.validation")
        kept = {key: value for key, value in grpo.items() if key not in drop}
        folder = trained({**kept, **common, **settings})
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        last = max((folder / "rollouts").glob("*.parquet"))
        return lines, read_rollouts(last)

    return run


def test_a_model_learns_in_an_environment_of_gymnasium_from_its_own_tasks(learn, tmp_path):
    (tmp_path / "digits_world.py").write_text(DIGITS)
    world = {"id": "Digits-v0", "register_file": str(tmp_path / "digits_world.py")}
    lines, rollouts = learn(
        {
            "environment": {"name": "gymnasium", "gymnasium": world},
            "data.source": "gymnasium",
            "data.gymnasium": world | {"count": 16, "held_out": 4},
            "tracking.rollouts_every_steps": 20,
        }
    )
    scores = [line["reward/score"] for line in lines]
    assert sum(scores[-3:]) > 10 * sum(scores[:3])
    assert all(line["environment/errors"] == 0 for line in lines)
    for rollout in rollouts:
        assert rollout.prompt.text.startswith("Digits like ")
        assert [message["role"] for message in rollout.messages] == ["assistant", "user", "assistant"]
        assert rollout.reward == pytest.approx(rollout.rewards["score"])
