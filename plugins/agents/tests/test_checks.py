"""What is no environment, or does not fit its run, is refused before anything is sampled."""

import re

import pytest

from engine_core.errors import ConfigError, DataError, PluginError, TrainingFailed

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
SPEC = {"rewards": frozenset({"solved", "steps"}), "needs": frozenset({"answer"}), "tools": TOOLS}

async def mine(episode):
    await episode.sample()
    return episode.rollout(REWARDS)
"""


def sets(rewards, tools="()"):
    return SETS.replace("REWARDS", rewards).replace("TOOLS", tools)


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


TOOL = '{"type": "function", "function": {"name": "add", "description": "Adds"}}'


def test_two_tools_of_one_name_are_refused(environment):
    with pytest.raises(PluginError, match=r"environment 'mine' declares the tool 'add' twice\. Remove one"):
        environment(sets("", tools=f"({TOOL}, {TOOL})"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("CHATML", "shows no tools in prompts"),
        (None, "cannot show them"),
        ("{% if tools %}{{ tools[0].type.x.y }}{% endif %}{{ messages[0].content }}", "cannot show them"),
    ],
)
def test_a_template_without_tools_is_refused_for_an_environment_that_declares_some(
    environment, templated, template, message
):
    tokenizer = templated(template)
    with pytest.raises(
        ConfigError, match=rf"environment 'mine' declares tools \(add\).*{message}.*check-template"
    ):
        environment(sets("", tools=f"({TOOL},)"), own=tokenizer)
    environment(sets("", tools=f"({TOOL},)"), own=tokenizer, data={"columns": {"tools": ""}})


def test_a_template_with_tools_is_accepted(environment, templated):
    environment(sets("", tools=f"({TOOL},)"), own=templated("{{ tools }}CHATML"))


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


@pytest.mark.parametrize("asks", ["", "episode.sample().close()"])  # the latter: not awaited
def test_an_episode_without_a_sample_fails_and_says_what_is_missing(
    environment, scripted, requests, play, caplog, asks
):
    source = f"""
    SPEC = {{"rewards": frozenset({{"solved"}})}}

    async def mine(episode):
        if episode.prompt.columns["number"] == 0:
            await episode.sample()
        {asks}
        episode.append("answered for it")
        return episode.rollout({{"solved": 1.0}})
    """
    runner = environment(source, max_failure_share=0.5)
    rollouts = play(runner, scripted(), requests(2, group_size=1))
    assert [(r.failure, r.valid) for r in rollouts] == [("", True), ("error", False)]
    assert "Call 'await episode.sample(...)' at least once" in caplog.text
    assert runner.metrics()["environment/errors"] == 1.0
    with pytest.raises(TrainingFailed, match=r"1 of 1 episodes.*await episode\.sample"):
        play(runner, scripted(), requests(2, group_size=1)[1:])


def test_a_prompt_that_leaves_no_room_is_truncated_though_nothing_is_sampled(
    environment, scripted, requests, play
):
    source = """
    SPEC = {"rewards": frozenset({"solved"})}

    async def mine(episode):
        while episode.goes_on:
            await episode.sample()
        return episode.rollout({"solved": 1.0})
    """
    runner = environment(source, max_tokens=2)  # the prompt has two
    (rollout,) = play(runner, scripted(), requests(1))
    assert (rollout.failure, rollout.finish_reason, rollout.rewards) == ("", "length", {"solved": 0.0})
    assert runner.metrics()["environment/truncated"] == 1.0


def test_rewards_that_do_not_apply_are_none(environment, scripted, requests, play):
    (rollout,) = play(environment(sets("{'solved': True, 'steps': None}")), scripted(), requests(1))
    assert rollout.rewards == {"solved": 1.0, "steps": None}


RETURNS = {
    "'text'": r"must return a Rollout, such as episode.rollout\(\); it returned 'text' \(str\)",
    "None": r"it returned None \(NoneType\)",
    "[episode.rollout()]": r"must return a Rollout.*\(list\)",
}


@pytest.mark.parametrize("returned", RETURNS)
def test_what_is_no_rollout_ends_the_run_with_the_plugins_name(
    environment, scripted, requests, play, returned
):
    runner = environment(f"async def mine(episode): return {returned}")
    with pytest.raises(PluginError, match=RETURNS[returned]) as error:
        play(runner, scripted(), requests(1))
    assert re.match(r"Plugin file 'environment_0.py' \(.*\): environment 'mine' must", str(error.value))


CHANGED = {
    "made.loss_mask[:] = True": "marks token 0",
    "made.loss_mask[-1] = True": r"marks token \d+ \('!'\) in loss_mask, which the policy did not sample",
    "made.rollout_log_probs[made.loss_mask] += 0.1": "gave turn 1 log-probs that are not those",
    "made.policy_versions += 1": "gave turn 1 policy versions",
    "made.token_ids[0] += 1": "does not begin with its prompt's tokens",
    "made.token_ids[2] += 1": "marks token 2",  # as encoding again would
    "made.loss_mask = made.loss_mask[1:]": r"gave \d+ loss_mask for \d+ tokens",
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_rollout_that_is_not_what_was_sampled_ends_the_run(environment, scripted, requests, play, change):
    source = f"""
    async def mine(episode):
        await episode.sample()
        episode.append("!")
        made = episode.rollout()
        {change}
        return made
    """
    with pytest.raises(PluginError, match=CHANGED[change]):
        play(environment(source), scripted(), requests(1))


def test_a_rollout_may_be_made_by_hand_of_what_the_policy_sampled(environment, scripted, requests, play):
    source = """
    import torch
    from engine_core.types import Rollout

    async def mine(episode):
        policy, prompt = episode.policy, episode.prompt
        first, second = await asyncio.gather(policy.sample(prompt.token_ids), policy.sample(prompt.token_ids))
        best = max(first, second, key=lambda turn: turn.text)
        ids = prompt.token_ids + best.token_ids
        zeros = torch.zeros(len(prompt.token_ids))
        return Rollout(
            "", prompt, torch.tensor(ids), torch.arange(len(ids)) >= len(zeros),
            torch.cat([zeros, best.log_probs]), torch.cat([zeros.int(), best.policy_versions]), "stop",
        )
    """
    asked = requests(2)
    rollouts = play(environment(source), scripted(), asked)
    assert [r.request_id for r in rollouts] == [r.id for r in asked]
    for rollout in rollouts:
        learned = rollout.extras["turns"][rollout.loss_mask]
        assert set(learned.tolist()) <= {1, 2}
        assert not rollout.extras["turns"][~rollout.loss_mask].any()
