"""What is no environment, or does not fit its run, is refused before anything is sampled."""

import pytest

from engine_core.errors import ConfigError, DataError, PluginError

WITH_OPTIONS = """
class MineOptions(Options):
    tries: int = 3

SPEC = {"config": MineOptions}
"""

REFUSED = {
    "def mine(episode): return episode.rollout()": "mine must be an 'async def' that takes an episode",
    "async def mine(): pass": r"must be callable as f\(episode\): too many positional arguments",
    "async def mine(prompt, policy): pass": r"missing a required argument: 'policy'",
    "mine = lambda episode: None": "<lambda> must be an 'async def'",
    "async def mine(episode):\n    yield 1": "must be an 'async def'",
    WITH_OPTIONS + "async def mine(episode, turns): pass": r"must be callable as f\(episode, \*, tries\)",
    WITH_OPTIONS
    + "class mine:\n    async def __call__(self, episode): pass": r"must be callable as mine\(tries\)",
    "class mine:\n    def __call__(self, episode): pass": "mine.__call__ must be an 'async def'",
    "class mine:\n    pass": "mine.__call__ must be an 'async def'",
    "class mine:\n    async def __call__(self): pass": r"callable as mine\(...\)\(episode\)",
}


@pytest.mark.parametrize("source", REFUSED)
def test_what_cannot_play_an_episode_is_refused_with_its_plugins_name(environment, source):
    with pytest.raises(PluginError, match=REFUSED[source]) as error:
        environment(source)
    assert "Plugin file 'environment_0.py'" in str(error.value)
    assert "environment 'mine'" in str(error.value)


SETS = """
SPEC = {"rewards": frozenset({"solved", "steps"}), "needs": frozenset({"answer"})}

async def mine(episode):
    await episode.sample()
    return episode.rollout(REWARDS)
"""


def sets(rewards):
    return SETS.replace("REWARDS", rewards)


def test_a_weight_of_a_reward_that_it_does_not_set_is_refused(environment):
    with pytest.raises(
        ConfigError, match=r"reward_weights: environment 'mine' sets no reward 'solve'. Did you mean 'solved'"
    ):
        environment(sets(""), reward_weights={"solve": 2.0})


def test_a_reward_of_the_same_name_is_refused(environment):
    with pytest.raises(
        ConfigError, match=r"Reward 'steps' is set by environment 'mine' and stands in \[\[reward\]\] too"
    ):
        environment(sets(""), rewards=("steps", "numeric"))


def test_data_without_its_column_is_refused(environment):
    with pytest.raises(DataError, match=r"needs the column 'answer'.*Did you mean 'answers'"):
        environment(sets(""), columns=("answers",))


def test_weights_default_to_one(environment):
    assert environment(sets(""), reward_weights={"steps": -0.1}).reward_weights == {
        "solved": 1.0,
        "steps": -0.1,
    }


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("{'solve': 1.0}", "reward 'solve' is not declared by the environment"),
        ("{'solved': float('nan')}", "must be a finite number or None, got nan"),
        ("{'solved': 'yes'}", "could not convert string to float"),
    ],
)
def test_a_reward_that_is_none_is_a_failure_of_the_episode(
    environment, scripted, requests, play, caplog, rewards, message
):
    runner = environment(sets(rewards), max_failure_share=1.0)
    (rollout,) = play(runner, scripted(), requests(1))
    assert rollout.failure == "error"
    assert message in caplog.text


def test_rewards_that_do_not_apply_are_none(environment, scripted, requests, play):
    (rollout,) = play(environment(sets("{'solved': True, 'steps': None}")), scripted(), requests(1))
    assert rollout.rewards == {"solved": 1.0, "steps": None}
